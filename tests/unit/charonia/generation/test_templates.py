"""Chat templates: the conventions of transformers, contents in parts, and templates that would take for ever."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest
import small_tokenizers

from charonia.errors import InvalidArgument
from charonia.generation.templates import render_chat
from charonia.generation.text_assets import TextAssets

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b> é"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def made(template: str, named: dict[str, str] | None = None) -> TextAssets:
    return TextAssets(
        b"", context=100, chat_template=template, named_templates=named or {}, special_tokens={"bos_token": "<s>"}
    )


def rendered(template: str, messages: Any = CHAT, **others: Any) -> str:
    return render_chat(made(template), messages, **others)


def test_a_quick_template_is_not_refused_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in which its thread does not run does not count."""

    class Stalled:
        def __str__(self) -> str:
            time.sleep(0.2)
            return "."

    monkeypatch.setattr("charonia.generation.templates.MAX_RENDER_S", 0.1)
    assert (
        rendered("{% for _ in range(300) %}x{% endfor %}{{ it }}{{ it }}", arguments={"it": Stalled()})
        == "x" * 300 + ".."
    )


def test_a_model_without_a_template_gets_chatml() -> None:
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b> é<|im_end|>\n"
    assert rendered("", add_generation_prompt=False) == expected
    assert rendered("") == expected + "<|im_start|>assistant\n"
    assert render_chat(made(""), CHAT, None, True) == rendered("")


def test_conventions() -> None:
    assert rendered("{{ bos_token }}{{ messages | length }}{{ eos_token }}") == "<s>2"
    assert rendered("{{ messages[1] | tojson }}") == '{"role": "user", "content": "Hi <b> é"}'
    assert rendered("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": [\n  2\n ],\n "b": 1\n}'
    assert rendered("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert rendered("a{% generation %}b{{ 1 }}{% endgeneration %}c") == "ab1c"
    assert rendered("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert rendered("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert rendered(
        "{{ 'a' ~ 1 ~ 'b' }}{% set x = 'c' ~ ('d' ~ 2) %}{{ x }}{{ 2 * 3 }}{{ 2 ** 3 }}{{ 'ab' * 2 }}{{ [1] + [2] }}"
    ) == ("a1bcd268abab[1, 2]")
    assert rendered("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}{{ (m('b') ~ 1) | trim }}") == "<a><b>1"


def test_tools_documents_and_further_names() -> None:
    template = "{{ tools | length if tools else 'none' }} {{ documents }} {{ enable_thinking }}"
    assert rendered(template) == "none None "
    assert rendered(template, tools=TOOLS, arguments={"documents": [{"text": "x"}], "enable_thinking": False}) == (
        "1 [{'text': 'x'}] False"
    )
    assert render_chat(made("plain", {"tool_use": "with {{ tools[0].function.name }}"}), CHAT, TOOLS) == "with add"
    assert render_chat(made("plain", {"tool_use": "with"}), CHAT, []) == "plain"


PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
READS_PARTS = "{% for m in messages %}{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endfor %}"


def test_contents_come_as_the_template_reads_them() -> None:
    plain = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    assert rendered(plain, PARTS) == "a\nb;"
    assert rendered(READS_PARTS, PARTS) == "[a][b]"
    assert rendered(READS_PARTS, [{"role": "user", "content": "c"}]) == "[c]"
    both = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    both += "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
    assert rendered(both, PARTS) == "[a][b]"
    assert rendered(both, [{"role": "user", "content": "c"}]) == "c"
    assert rendered(plain, [{"role": "assistant", "content": None}]) == ";"


def test_arguments_of_earlier_calls_become_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert rendered(template, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == '{"a": 1}'
    assert rendered("{{ 'tool_calls' in messages[0] }}", [{"role": "user", "content": "", "tool_calls": []}]) == "False"


def test_a_last_message_is_continued() -> None:
    chat = [*CHAT, {"role": "assistant", "content": "Hello, "}]
    assert rendered("", chat, continue_final_message=True).endswith("<|im_start|>assistant\nHello, ")
    with pytest.raises(InvalidArgument, match="continue_final_message"):
        rendered("nothing", chat, continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{% for %}", "cannot be read"),
        ("{{ messages[0].no.more }}", "refuses the messages"),
        ("{{ 1 + 'a' }}", "cannot render the messages: TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include 'x' %}", "messages"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    ],
)
def test_what_a_template_may_not_do(template: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        rendered(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for a in range(10**9) %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ [0] * 10**10 }}",
        "{{ 9 ** 9 ** 9 ** 9 ** 9 ** 9 }}",
        "{{ 2 ** (10 ** 10) }}",
        "{% set n = namespace(x=3) %}{% for a in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% set n = namespace(x='aaaaaaaa') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='aaaaaaaa') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_templates_that_would_take_for_ever(template: str) -> None:
    begin = time.process_time()
    with pytest.raises(InvalidArgument, match="chat"):
        rendered(template)
    assert time.process_time() - begin < 4.0


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [1],
        [{"content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}],
        [{"role": "assistant", "tool_calls": [5]}],
    ],
)
def test_messages_of_another_form_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidArgument):
        rendered("", messages)


def test_hostile_messages_are_only_text() -> None:
    hostile = "{{ 1 + 1 }}{% for a in range(9) %}x{% endfor %}"
    assert hostile in rendered("", [{"role": "user", "content": hostile}])


def test_the_template_of_smollm2() -> None:
    tokenizer = small_tokenizers.smollm2()
    if tokenizer is None:
        pytest.skip(f"{small_tokenizers.GGUF_VARIABLE} names no file")
    found = render_chat(tokenizer.assets, [{"role": "user", "content": "Hi"}], None, True)
    assert found.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert found.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
