"""Structured output: random walks along the masks give texts that fit; bombs are refused in words, in bounded time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import small_tokenizers

from charonia.errors import InvalidArgument
from charonia.generation.grammar import Matcher, check
from charonia.generation.parameters import StructuredKind, StructuredOutput
from charonia.generation.text_assets import TextAssets
from charonia.generation.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["city", "n"],
    "additionalProperties": False,
}


def allowed(words: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def walk(structured: StructuredOutput, seed: int, begin: tuple[int, ...] = ()) -> tuple[list[int], str]:
    """Tokens drawn at random from the masks until the text is finished, and their text."""
    tokenizer = small_tokenizers.byte_level()
    matcher = Matcher(structured, tokenizer)
    tokens = list(begin)
    for token in begin:
        matcher.push(token)
    while not matcher.finished:
        # what is drawn depends on the place alone, as in sampling
        chosen = int(np.random.default_rng([seed, len(tokens)]).choice(allowed(matcher.mask())))
        matcher.push(chosen)
        tokens.append(chosen)
        assert len(tokens) < 2000
    return tokens, tokenizer.decode(token for token in tokens if token != 2).decode()


def fits(kind: StructuredKind, constraint: Any, text: str) -> bool:
    if kind == "choice":
        return text in constraint
    if kind == "regex":
        return re.fullmatch(constraint, text) is not None
    if kind == "grammar":
        return text.count("(") == text.count(")") and text.strip("()") == "x"
    value = json.loads(text)
    return isinstance(value, dict) and (
        kind == "json_object" or (set(value) == {"city", "n"} and 0 <= value["n"] < 1000)
    )


@pytest.mark.parametrize(
    ("kind", "constraint", "text"),
    [
        ("json", SCHEMA, json.dumps(SCHEMA)),
        ("regex", r"[a-c]{3,5}-\d{2}", r"[a-c]{3,5}-\d{2}"),
        ("choice", ["yes", "no", "not at all", 'a "quoted" \\one\n', "日本 (1+1)"], None),
        ("grammar", None, 'start: "(" start ")" | "x"'),
        ("json_object", None, ""),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_texts_along_the_masks_fit(kind: StructuredKind, constraint: Any, text: str | None, seed: int) -> None:
    structured = StructuredOutput(kind, json.dumps(constraint) if text is None else text)
    check(structured)
    check(structured, small_tokenizers.byte_level())
    tokens, found = walk(structured, seed)
    assert fits(kind, constraint, found), found
    cut = len(tokens) // 2
    assert walk(structured, seed, tuple(tokens[:cut])) == (tokens, found)


def test_special_tokens_are_no_text() -> None:
    tokenizer = small_tokenizers.byte_level()
    matcher = Matcher(StructuredOutput("regex", ".*"), tokenizer)
    assert not {0, 1} & set(allowed(matcher.mask()).tolist())
    assert 2 in allowed(matcher.mask())
    matcher.push(2)
    assert matcher.finished


def test_a_token_that_does_not_fit_is_an_error() -> None:
    matcher = Matcher(StructuredOutput("regex", "a"), small_tokenizers.byte_level())
    with pytest.raises(InvalidArgument, match="token 5 does not fit"):
        matcher.push(5)


def test_a_model_without_end_tokens_is_refused() -> None:
    whole = small_tokenizers.byte_level().assets.tokenizer_json
    tokenizer = Tokenizer.from_bytes(whole, TextAssets(whole, context=10))
    with pytest.raises(InvalidArgument, match="an end token"):
        Matcher(StructuredOutput("regex", "a"), tokenizer)


def nested(count: int, wrap: Callable[[Any], Any]) -> Any:
    found: Any = {"type": "string"}
    for _ in range(count):
        found = wrap(found)
    return found


def references(count: int, wrap: Callable[[Any], Any]) -> Any:
    definitions: dict[str, Any] = {f"d{at}": wrap({"$ref": f"#/$defs/d{at + 1}"}) for at in range(count)}
    return {"$defs": definitions | {f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


BAD: list[tuple[StructuredKind, Any, str]] = [
    ("json", "{", "json: "),
    ("json", "[]", "must be an object, got list"),
    ("json", "false", "must be an object, got bool"),
    ("json", {"type": "nope"}, "Invalid type"),
    ("json", {"$ref": "#/nowhere"}, "does not exist"),
    ("json", {"$ref": "http://127.0.0.1:9/x.json"}, "not present in a registry"),
    ("json", "[" * 60_000, "json: "),
    ("json", nested(300, lambda inner: {"not": inner}), "Recursion limit"),
    ("json", references(600, lambda inner: {"not": inner}), "at most 512 references, got 601"),
    ("json", {"type": "object", "properties": {f"p{at}": {} for at in range(3000)}}, "number of symbols"),
    ("json", {"enum": [f"value {at}" for at in range(10_000)]}, "at most 65536 characters"),
    (
        "json",
        {"allOf": [{"anyOf": [{"properties": {f"{a}{b}": {}}} for b in range(4)]} for a in range(12)]},
        "too large",
    ),
    ("json", {"type": "string", "pattern": "[z-a]"}, "json: regex parse error: [z-a]"),
    ("regex", "(a", "unclosed group"),
    ("regex", r"[^\x00-\U0010FFFF]", "regex: no text fits it"),
    ("regex", "(?=a)b", "look-around"),
    ("regex", "(" * 4000 + "a" + ")" * 4000, "invalid regex"),
    ("regex", "a" * 10_000, "at most 8192 characters, got 10000"),
    ("choice", [str(at) for at in range(2000)], "at most 1024 choices, got 2000"),
    ("grammar", 'start: "a', "lexer error"),
    ("grammar", "", "grammar: "),
    ("grammar", "start: A\nA: A", "circular"),
    ("grammar", "start: " + "(" * 10_000, "too deeply nested"),
    ("grammar", "start: A\nA: /.*a.{30}/ & /.*b.{30}/ & ~/.*c.{40}/", "fuel"),
    ("grammar", "start: x\n" + "".join(f"r{at}: r{at + 1}\n" for at in range(2000)), "at most 512 colons, got 2001"),
]


@pytest.mark.parametrize(("kind", "text", "words"), BAD, ids=[f"{at}-{each[0]}" for at, each in enumerate(BAD)])
def test_what_cannot_be_used_is_refused_in_words(kind: StructuredKind, text: Any, words: str) -> None:
    structured = StructuredOutput(kind, text if isinstance(text, str) else json.dumps(text))
    begin = time.process_time()
    with pytest.raises(InvalidArgument, match="structured_outputs: " + kind) as caught:
        check(structured)
    assert words in caught.value.message
    assert len(caught.value.message) < 500
    assert "no_forcing" not in caught.value.message
    assert "x-guidance" not in caught.value.message
    assert time.process_time() - begin < 4.0


BOMBS: list[tuple[StructuredKind, Any]] = [
    ("regex", "((((a{1,100}){1,100}){1,100}){1,100})"),
    ("regex", ".*a.{1,18}"),
    ("regex", r"(\w|\d|\p{L}){0,3000}x" * 40),
    ("regex", "(.{1,1000}x){1,1000}" * 300),
    ("json", {"type": "string", "minLength": 10**9}),
    ("json", {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 5000}}),
    ("json", {"type": "integer", "multipleOf": 9876}),
    ("json", {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}),
    ("json", references(510, lambda inner: {"properties": {"a": inner}})),
    ("json", references(250, lambda inner: {"allOf": [{"items": {"anyOf": [{"prefixItems": [inner]}]}}]})),
    ("json", {"type": "object", "properties": {f"p{at}": {} for at in range(1000)}}),
    ("regex", "a?" * 4000),
    ("grammar", 'start: "a"' + ' | "a"' * 5000),
    ("json", references(40, lambda inner: {"allOf": [inner, inner]})),
    ("json", references(40, lambda inner: {"anyOf": [inner, inner]})),
    ("json", {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    ("grammar", 'start: (("a"{1,10000}){1,10000}){1,10000}'),
    ("grammar", 'start: start start | "a" | start start start'),
    # one way alone to go on, for so many bytes
    ("regex", "x{2000000}"),
    ("regex", "(x{10,20}){600}"),
    ("regex", "xx?" * 2700),
    ("json", {"type": "string", "pattern": "^(x{10,20}){600}$"}),
    ("json", {"type": "object", "patternProperties": {"^x{2000000}$": {}}, "minProperties": 1}),
    ("grammar", "start: A\nA: /(x{10,20}){600}/"),
    ("grammar", "start: r0\n" + "".join(f"r{at}: r{at + 1}\n" for at in range(500)) + 'r500: "a"'),
    ("grammar", "start: R0\n" + "".join(f"R{at}: R{at + 1}\n" for at in range(500)) + 'R500: "a"'),
]


@pytest.mark.parametrize(("kind", "text"), BOMBS, ids=[f"{at}-{each[0]}" for at, each in enumerate(BOMBS)])
def test_what_is_made_to_exhaust_takes_bounded_time(kind: StructuredKind, text: Any) -> None:
    """A hundred steps, or a refusal on the way."""
    structured = StructuredOutput(kind, text if isinstance(text, str) else json.dumps(text))
    random = np.random.default_rng(0)
    times = [time.process_time()]
    try:
        check(structured)
        times.append(time.process_time())
        matcher = Matcher(structured, small_tokenizers.byte_level())
        for _ in range(100):
            times.append(time.process_time())
            if matcher.finished:
                break
            matcher.push(int(random.choice(allowed(matcher.mask()))))
    except InvalidArgument:
        times.append(time.process_time())
    assert max(np.diff(times)) < 4.0


def test_chains_of_rules_do_not_end_a_process_with_small_stacks() -> None:
    """In a process of its own: a stack that overflows ends the process."""
    script = (
        "import threading; from charonia.generation.grammar import check, MAX_COLONS\n"
        "from charonia.generation.parameters import StructuredOutput\n"
        "n = MAX_COLONS - 2\n"
        "text = 'start: r0\\n' + ''.join(f'r{i}: r{i + 1}\\n' for i in range(n)) + f'r{n}: \"a\"'\n"
        "threading.stack_size(512 << 10)\n"
        "thread = threading.Thread(target=check, args=(StructuredOutput('grammar', text),))\n"
        "thread.start(); thread.join(); print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "alive", done.stderr
