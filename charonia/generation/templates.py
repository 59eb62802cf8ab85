"""The prompt of a chat, by the model's chat template in jinja2, with the conventions of Hugging Face's transformers.

A template comes with the model: it runs in jinja's sandbox, and loops, products, sums and output are counted, so that
it cannot hold up a gateway. What a single filter or a format with a width makes is not bounded. `text_assets` has the
template's text.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from charonia.errors import InvalidArgument, Unsupported
from charonia.generation.text_assets import TextAssets
from charonia.generation.tokenizer import MISSING_EXTRA

MAX_PROMPT_CHARACTERS = 16 << 20
MAX_RENDER_S = 2.0
"""Of its thread's processor time: on a busy machine a quick template may take longer than that by the clock."""
MAX_LOOP_ROUNDS = 1_000_000
MAX_NUMBER_BITS = 4096
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The template of models without one."""
_CACHED_TEMPLATES = 32
_COUNT = "charonia_count_round"
_JOIN = "charonia_join"


def render_chat(
    assets: TextAssets,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    *,
    continue_final_message: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Returns the prompt. `messages` and `tools` have OpenAI's form; `arguments` are further names for the template.

    The content of a message is a text or a list of text parts; the template gets what it can read. Arguments of calls
    that are JSON text become objects. With `continue_final_message` the prompt ends in the last message.
    Raises `InvalidArgument` for messages that the template refuses or cannot render, and where it takes too much work;
    `Unsupported` without the library.
    """
    text = assets.chat_template or CHATML
    if tools and "tool_use" in assets.named_templates:
        text = assets.named_templates["tool_use"]
    template = _template(text)
    given = [_message(message, template) for message in messages]
    if not given:
        raise InvalidArgument("a chat needs at least one message")
    names = {
        **dict(assets.special_tokens),
        "documents": None,
        **dict(arguments or {}),
        "messages": given,
        "tools": list(tools) if tools else None,
        "add_generation_prompt": add_generation_prompt and not continue_final_message,
    }
    prompt = template.render(names)
    return _continued(prompt, given[-1]) if continue_final_message else prompt


class _Template:
    """A compiled template. `wants_parts`: it goes over the parts of contents; `takes_text`: it reads texts as well."""

    def __init__(self, compiled: Any, wants_parts: bool, takes_text: bool) -> None:
        self._compiled = compiled
        self.wants_parts = wants_parts
        self.takes_text = takes_text

    def render(self, names: Mapping[str, Any]) -> str:
        import jinja2

        pieces, size = [], 0
        with _budget() as budget:
            try:
                for piece in self._compiled.generate(names):
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_PROMPT_CHARACTERS:
                        raise InvalidArgument(f"the chat has more than {MAX_PROMPT_CHARACTERS} characters")
                    budget.check_time()
            except InvalidArgument:
                raise
            except jinja2.TemplateError as error:
                raise InvalidArgument(f"the model's chat template refuses the messages: {error}") from None
            except Exception as error:  # whatever an operation of the template raises
                reason = f"{type(error).__name__}: {error}"
                raise InvalidArgument(f"the model's chat template cannot render the messages: {reason}") from None
        return "".join(pieces)


class _Budget:
    """What one rendering may take."""

    def __init__(self) -> None:
        self._rounds = 0
        self._until_s = time.thread_time() + MAX_RENDER_S

    def count_round(self) -> None:
        self._rounds += 1
        if self._rounds > MAX_LOOP_ROUNDS:
            raise InvalidArgument(f"the model's chat template takes more than {MAX_LOOP_ROUNDS} rounds of loops")
        if not self._rounds & 0xFF:
            self.check_time()

    def check_time(self) -> None:
        if time.thread_time() > self._until_s:
            raise InvalidArgument(f"the model's chat template takes longer than {MAX_RENDER_S:g} s of processor time")


_BUDGET: ContextVar[_Budget] = ContextVar("budget of a chat template")


@contextmanager
def _budget() -> Iterator[_Budget]:
    budget = _Budget()
    token = _BUDGET.set(budget)
    try:
        yield budget
    finally:
        _BUDGET.reset(token)


@functools.lru_cache(_CACHED_TEMPLATES)
def _template(text: str) -> _Template:
    environment = _environment()
    import jinja2

    try:
        return _Template(environment.from_string(text), *_content_forms(environment.parse(text)))
    except (jinja2.TemplateError, RecursionError) as error:
        raise InvalidArgument(f"the model's chat template cannot be read: {error}") from None


def _content_forms(tree: Any) -> tuple[bool, bool]:
    """Whether a template goes over the parts of a content, and whether it tests for a text."""
    from jinja2 import nodes

    loops = list(tree.find_all(nodes.For))
    goes_over = any(
        (isinstance(part, nodes.Getattr) and part.attr == "content")
        or (isinstance(part, nodes.Getitem) and isinstance(part.arg, nodes.Const) and part.arg.value == "content")
        for loop in loops
        for part in [loop.iter]
    )
    return goes_over, any(test.name in ("string", "iterable", "sequence") for test in tree.find_all(nodes.Test))


@functools.cache
def _environment() -> Any:
    try:
        from jinja2 import nodes
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise Unsupported(MISSING_EXTRA.format(what="a chat template", package="jinja2")) from None

    class GenerationBlocks(Extension):  # type: ignore[misc]
        """`{% generation %}` marks what an assistant wrote, for training: its body is rendered as it is."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class CountedEnvironment(ImmutableSandboxedEnvironment):  # type: ignore[misc]
        """The sandbox, with a budget for loops and for texts that operators make."""

        intercepted_binops = frozenset({"*", "**", "+"})

        def _parse(self, source: str, name: Any, filename: Any) -> Any:
            tree = super()._parse(source, name, filename)
            for body in [loop.body for loop in tree.find_all((nodes.For, nodes.Macro))]:
                call = nodes.Call(nodes.Name(_COUNT, "load"), [], [], None, None)
                body.insert(0, nodes.ExprStmt(call).set_lineno(1))
            _replace_joins(tree, nodes)
            return tree

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "+":
                if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                    _check_size(len(left) + len(right))
                return left + right
            if isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
                if bits > MAX_NUMBER_BITS:
                    raise InvalidArgument(
                        f"the model's chat template makes a number of more than {MAX_NUMBER_BITS} bits"
                    )
            elif operator == "*":
                _check_size(_extent(left) * _extent(right))
            return left * right if operator == "*" else left**right

    environment = CountedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raiser(TemplateError)
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals[_COUNT] = lambda: _BUDGET.get().count_round()
    environment.globals[_JOIN] = _join
    return environment


def _replace_joins(tree: Any, nodes: Any) -> None:
    """Make each `a ~ b` a call of `_join`, which bounds its size."""
    for node in [tree, *tree.find_all(nodes.Node)]:
        for field in node.fields:
            value = getattr(node, field)
            if isinstance(value, nodes.Concat):
                setattr(node, field, _joined(value, nodes))
            elif isinstance(value, list):
                value[:] = [_joined(each, nodes) if isinstance(each, nodes.Concat) else each for each in value]


def _joined(node: Any, nodes: Any) -> Any:
    return nodes.Call(nodes.Name(_JOIN, "load"), list(node.nodes), [], None, None).set_lineno(node.lineno)


def _join(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _extent(value: object) -> float:
    """How long a text or list is, or how often a number repeats one."""
    if isinstance(value, str | list | tuple):
        return len(value)
    return abs(value) if isinstance(value, int) else 0.0


def _check_size(size: float) -> None:
    if size > MAX_PROMPT_CHARACTERS:
        raise InvalidArgument(f"the model's chat template makes a text of more than {MAX_PROMPT_CHARACTERS} characters")


def _raiser(error: type[Exception]) -> Callable[[str], None]:
    def raise_exception(message: str) -> None:
        raise error(message)

    return raise_exception


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: jinja's own filter escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _message(given: Mapping[str, Any], template: _Template) -> dict[str, Any]:
    """A message as the template reads it. Raises `InvalidArgument` for one of another form."""
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise InvalidArgument("a message must be an object with a role")
    message = dict(given)
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else None
    texts = [_part(part) for part in parts] if parts is not None else None
    if texts is not None:
        as_parts = [{"type": "text", "text": text} for text in texts]
        message["content"] = as_parts if template.wants_parts else "\n".join(texts)
    elif content is None:
        message["content"] = ""
    elif not isinstance(content, str):
        raise InvalidArgument(
            f"the content of a message must be a text or a list of parts, got {type(content).__name__}"
        )
    elif template.wants_parts and not template.takes_text:
        message["content"] = [{"type": "text", "text": content}]
    if message.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    else:
        message.pop("tool_calls", None)
    return message


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return text
    raise InvalidArgument(f"a part of a message's content must be a text, got {str(kind)[:80]!r}")


def _call(call: object) -> dict[str, Any]:
    """An earlier call; its arguments as an object, which templates turn into JSON themselves."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidArgument("a call of a tool must be an object with a function")
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise InvalidArgument("the arguments of an earlier call of a tool must be JSON") from None
    return {**call, "function": function}


def _continued(prompt: str, last: Mapping[str, Any]) -> str:
    """The prompt up to the end of the last message's text."""
    content = last["content"]
    text = content if isinstance(content, str) else str(content[-1]["text"]) if content else ""
    at = prompt.rfind(text.strip())
    if not text.strip() or at < 0:
        raise InvalidArgument("continue_final_message needs a last message whose text stands in the prompt")
    end = at + len(text.strip())
    spaces = text[len(text.rstrip()) :]
    return prompt[:end] + (spaces if prompt.startswith(spaces, end) else "")
