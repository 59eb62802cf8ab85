"""Histories of schedulers as text: what was observed when, and below it what was decided. Read, replayed and recorded.

    # What it shows, and why.
    ModelScheduler("b")                                     the scheduler; another one is another owner

    0us     PolicyChanged(ModelInterface(max_batch_size=4, dynamic_batching=DynamicBatching(max_queue_delay_us=100)))
            + VersionServed("e")                            observed together with the line above
    10us    RequestQueued(a, rows=2)                        a bare name is the id of a request
            ~ wake at 110us                                 what `next_wakeup` says, where that has changed
    110us   advance                                         time passed
            -> DispatchBatch("b-1", "e", requests=[a])      a decision
            ~ no wake
            ? step(b)                                       a question to the scheduler
            = None

Observations are calls of their classes with constants, and may go on in the next line. A field that has its usual
value (`_USUAL`, else its default) is left out, in decisions too. `replay` keeps every line but those of decisions and
answers. A request for text has `prompt="doc:512 own:20"`, of so many tokens that are the same wherever the word is, and
perhaps `max_tokens=64`; a recorded one has the names of its beginnings.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from batcher.scheduling import decisions, observations
from batcher.scheduling.ensembles import ensemble_planner
from batcher.scheduling.sequences.sequence_dispatch import Delays
from batcher.scheduling.sequences.sequence_scheduler import SequenceScheduler
from batcher.scheduling.stateless.scheduler import ModelScheduler
from batcher.scheduling.verbs import Scheduler
from charonia import errors
from charonia.facts.sequence_states import SequenceAbout
from charonia.generation.prompt_keys import PromptRoute, route_of_tokens
from charonia.models import ensemble, interface, scheduling, sequence_batcher
from charonia.wire import PREFIX_BYTES, BatchPlaces, RequestMeta, SequenceMark, SequencePlace

_UNITS_NS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1000, "ns": 1}
_STEP = re.compile(r"(\d+)(s|ms|us|ns)\s+(?=\S)")
_BESIDE, _QUESTION = "+ ", "? "
_OUTPUT = ("-> ", "~ ", "= ")
_INDENT = " " * 8


def _ensemble(name: str, max_held_bytes: int = 1 << 20) -> ensemble_planner.EnsembleScheduler:
    return ensemble_planner.EnsembleScheduler(name, bool, max_held_bytes)


_SCHEDULERS: dict[str, Callable[..., Any]] = {
    "ModelScheduler": ModelScheduler,
    "SequenceScheduler": SequenceScheduler,
    "EnsembleScheduler": _ensemble,
}
_KNOWN: dict[str, Any] = {
    name: value
    for module in (observations, decisions, ensemble_planner, errors, ensemble, interface, scheduling, sequence_batcher)
    for name, value in vars(module).items()
    if isinstance(value, type)
} | {one.__name__: one for one in (BatchPlaces, Delays, SequenceAbout, SequenceMark, SequencePlace)}
_LEADING = {"id", "batch_id", "executor", "request", "name", "correlation_id", "interface", "graph", "about"}
"""Fields that are written without their names."""
_USUAL: dict[str, Any] = {
    "attempts": None,  # as many first ones as there are requests
    "backend": "",
    "candidates": 0,
    "checkpoint_every": 1,
    "content_hash": "",
    "controls": (),
    "deadline_ns": 0,
    "direct": True,
    "enqueued_ns": None,  # now
    "inputs": {},
    "instance": 0,
    "iterative": False,
    "level": 0,
    "max_idle_us": 1_000_000,
    "max_queue_delay_us": 0,
    "minimum_slot_utilization": 0.0,
    "name": "m",
    "outputs": {},
    "path": (),
    "platform": "",
    "preferred_batch_sizes": (),
    "preserve_ordering": False,
    "rows": 1,
    "signature": 0,
    "slots": 1,
    "states": (),
    "timeout_us": 0,
    "used_us": 0,
    "version": 1,
    "via_owner": False,
    "wanted": (),
}
_FIELDS = observations.RequestQueued.__struct_fields__
_OWN_FIELDS = {"carrier", "meta", *_FIELDS[_FIELDS.index("state") :]} - {"losses_apart"}
"""Of a request: what the service or the scheduler keeps there."""
_OF_STEPS = (ensemble_planner.SubmitStep, ensemble_planner.CancelStep, ensemble_planner.WantResponses)
"""Decisions about a step, which is written by its number."""


def id_of(name: str) -> bytes:
    """The id of the request "a", or "w_3", the third of the wave "w"."""
    base, _, number = name.partition("_")
    return base.encode().ljust(PREFIX_BYTES, b"\0") + bytes([int(number or 0)])


def time_text(now_ns: int) -> str:
    unit = next((unit for unit, size_ns in _UNITS_NS.items() if now_ns and now_ns % size_ns == 0), "us")
    return f"{now_ns // _UNITS_NS[unit]}{unit}"


# -- from text ---------------------------------------------------------------------------------------------------------


class _Reader:
    """Reads the observations of one scheduler. Requests are named by the line that has them first."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._requests: dict[bytes, observations.RequestQueued] = {}

    def read(self, text: str) -> Any:
        return self._value(ast.parse(text.strip(), mode="eval").body)

    def question(self, text: str) -> tuple[str, list[Any]]:
        """The method that is asked, and its arguments."""
        node = ast.parse(text, mode="eval").body
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Name)
        return node.func.id, [self._value(argument) for argument in node.args]

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return self._call(name, node)
            case ast.Name(id=name):
                return id_of(name)
            case ast.Attribute(value=ast.Name(id=name), attr=member):
                return _KNOWN[name][member]
            case ast.Set(elts=elements):
                return frozenset(self._value(element) for element in elements)
            case ast.List(elts=elements):
                return [self._value(element) for element in elements]
            case ast.Tuple(elts=elements):
                return tuple(self._value(element) for element in elements)
            case ast.Dict(keys=keys, values=values):
                return {self._value(k): self._value(v) for k, v in zip(keys, values, strict=True) if k is not None}
        return ast.literal_eval(node)

    def _call(self, name: str, node: ast.Call) -> Any:
        values = [self._value(argument) for argument in node.args]
        named = {keyword.arg or "": self._value(keyword.value) for keyword in node.keywords}
        if name == "frozenset":
            return frozenset(*values)
        if name in _SCHEDULERS:
            return _SCHEDULERS[name](*values, **named)
        if name == "PromptRoute":
            return PromptRoute(*values[:2], bytes.fromhex(values[2]))
        made = _KNOWN[name]
        if "prompt" in named:
            named["meta"] = _with_prompt(named.pop("prompt"), named.pop("max_tokens", 0))
        if issubclass(made, Exception):
            return made(*values)
        fields = _fields(made)
        for field in fields:  # those without a name are the first that may be written so
            if values and field in _LEADING and field not in named:
                named[field] = values.pop(0)
        if values:
            raise ValueError(f"{name}: which field is {values[0]!r}?")
        for field, is_needed in fields.items():
            if is_needed and field not in named:
                named[field] = self.now_ns if field == "enqueued_ns" else _usual(made, field)
        if made is not Delays and "requests" in named:
            named["requests"] = [self._requests[r] if isinstance(r, bytes) else r for r in named["requests"]]
        result = made(**named)
        if made is observations.RequestQueued:
            self._requests.setdefault(result.id, result)
        return result


def _with_prompt(prompt: str | PromptRoute, max_tokens: int) -> RequestMeta:
    if isinstance(prompt, str):
        words = [word.split(":") for word in prompt.split()]
        tokens = [token for word, count in words for token in [zlib.crc32(word.encode()) >> 1] * int(count)]
        prompt = route_of_tokens(tokens, max_tokens=max_tokens)
    return RequestMeta(1, "", (), (), {}, b"", prompt)


def _fields(made: Any) -> dict[str, bool]:
    """The fields of a class, and whether each must be given."""
    if dataclasses.is_dataclass(made):
        missing = dataclasses.MISSING
        return {
            f.name: f.default is missing and f.default_factory is missing for f in dataclasses.fields(made) if f.init
        }
    names = made.__struct_fields__
    needed = len(names) - len(made.__struct_defaults__)
    return {name: at < needed for at, name in enumerate(names)}


def _usual(made: Any, field: str) -> Any:
    return 0 if (made, field) == (BatchPlaces, "rows") else _USUAL[field]


# -- to text -----------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes what one scheduler sees and decides. Ids that are no names get some, `r1` and so on."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._names: dict[bytes, str] = {}
        self._seen: set[bytes] = set()

    def text(self, value: Any) -> str:
        match value:
            case observations.RequestQueued() if value.id in self._seen:
                return self._name(value.id)
            case observations.RequestQueued():
                self._seen.add(value.id)
                return self._object(value)
            case enum.Enum():
                return f"{type(value).__name__}.{value.name}"
            case bool() | None | float():
                return str(value)
            case int():
                return f"{value:_}" if abs(value) >= 10_000 else str(value)
            case str():
                return json.dumps(value)
            case bytes() if len(value) == PREFIX_BYTES + 1:
                return self._name(value)
            case bytes():
                return repr(value)
            case frozenset() | set():
                return "{" + ", ".join(sorted(map(self.text, value))) + "}" if value else "frozenset()"
            case tuple():
                return "(" + ", ".join(map(self.text, value)) + ("," if len(value) == 1 else "") + ")"
            case list():
                return "[" + ", ".join(map(self.text, value)) + "]"
            case Mapping():
                return "{" + ", ".join(f"{self.text(k)}: {self.text(v)}" for k, v in value.items()) + "}"
            case PromptRoute():
                return f'PromptRoute({value.tokens}, {value.max_tokens}, "{value.keys.hex()}")'
            case Exception():
                return f"{type(value).__name__}({json.dumps(str(value))})"
        return self._object(value)

    def _object(self, value: Any) -> str:
        made = type(value)
        parts: list[str] = []
        named = False
        for field, is_needed in _fields(made).items():
            item = getattr(value, field)
            if made is observations.RequestQueued and field in _OWN_FIELDS:
                continue
            if self._is_usual(value, field, item, is_needed):
                continue
            leads = field in _LEADING and not named
            named |= not leads
            if isinstance(value, _OF_STEPS) and field == "step":
                item = item.index
            parts.append(self.text(item) if leads else f"{field}={self.text(item)}")
        if made is observations.RequestQueued and value.meta is not None and value.meta.prompt is not None:
            parts.append(f"prompt={self.text(value.meta.prompt)}")
        return f"{made.__name__}({', '.join(parts)})"

    def _is_usual(self, value: Any, field: str, item: Any, is_needed: bool) -> bool:
        if field == "enqueued_ns":
            return bool(item == self.now_ns)
        if field == "attempts":
            return all(attempt == 1 for attempt in item)
        if is_needed:
            return field in _USUAL and bool(item == _usual(type(value), field))
        return bool(item == _default(type(value), field))

    def _name(self, request_id: bytes) -> str:
        base, number = request_id[:PREFIX_BYTES], request_id[PREFIX_BYTES]
        written = base.rstrip(b"\0")
        name = self._names.get(base)
        if name is None:
            readable = written.decode() if written.isascii() else ""
            name = readable if re.fullmatch(r"[a-zA-Z][a-zA-Z0-9]*", readable) else f"r{len(self._names) + 1}"
            self._names[base] = name
        return f"{name}_{number}" if number else name


def _default(made: Any, field: str) -> Any:
    if dataclasses.is_dataclass(made):
        found = next(f for f in dataclasses.fields(made) if f.name == field)
        return found.default if found.default is not dataclasses.MISSING else found.default_factory()  # type: ignore[misc]
    names, defaults = made.__struct_fields__, made.__struct_defaults__
    return defaults[names.index(field) - len(names)]


# -- histories ---------------------------------------------------------------------------------------------------------


class Recorder:
    """A scheduler whose history is kept. `made` is the call that makes it, as a history has it."""

    def __init__(self, made: str) -> None:
        self.scheduler: Scheduler = _Reader().read(made)
        self._writer = _Writer()
        self._lines = [made, ""]
        self._wakeup: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def observe(self, event: Any, now_ns: int) -> list[Any]:
        return self.observe_all((event,), now_ns)

    def observe_all(self, events: Iterable[Any], now_ns: int) -> list[Any]:
        return self.see(list(events), now_ns)[0]

    def see(self, events: list[Any], now_ns: int) -> tuple[list[Any], list[str]]:
        """The decisions, and the lines that say them."""
        self._writer.now_ns = now_ns
        written = [self._writer.text(event) for event in events] or ["advance"]
        self._lines.append(f"{time_text(now_ns):<7} {written[0]}")
        self._lines += [f"{_INDENT}{_BESIDE}{more}" for more in written[1:]]
        decided = self.scheduler.observe_all(events, now_ns)
        lines = [f"{_INDENT}-> {self._writer.text(decision)}" for decision in decided]
        wakeup = self.scheduler.next_wakeup()
        if wakeup != self._wakeup:
            self._wakeup = wakeup
            lines.append(f"{_INDENT}~ " + ("no wake" if wakeup is None else f"wake at {time_text(wakeup)}"))
        self._lines += lines
        return decided, lines

    def advance(self, now_ns: int) -> list[Any]:
        return self.observe_all((), now_ns)

    def answer(self, question: str) -> str:
        """The line that answers a question."""
        name, arguments = _Reader().question(question)
        return f"{_INDENT}= {self._writer.text(getattr(self.scheduler, name)(*arguments))}"

    def text(self, *, heading: str) -> str:
        return "\n".join([f"# {heading}", *self._lines, ""])


def replay(text: str) -> str:
    """The history with the decisions that schedulers of now take."""
    replayed: list[str] = []
    recorder: Recorder | None = None
    reader = _Reader()
    lines = [line for line in text.splitlines() if not line.strip().startswith(_OUTPUT)]
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        replayed.append(line)
        if not line or line.startswith("#"):
            continue
        if (step := _STEP.match(line)) is None:
            recorder, reader = Recorder(line), _Reader()
            continue
        assert recorder is not None, "which scheduler sees it?"
        observed = [line[step.end() :]]
        questions: list[str] = []
        while at < len(lines) and lines[at].startswith(" "):
            more = lines[at].strip()
            if more.startswith(_QUESTION):
                questions.append(lines[at])
                at += 1
                continue
            if more.startswith(_BESIDE):
                observed.append(more.removeprefix(_BESIDE))
            else:
                observed[-1] += " " + more
            replayed.append(lines[at])
            at += 1
        now_ns = reader.now_ns = int(step[1]) * _UNITS_NS[step[2]]
        events = [reader.read(one) for one in observed] if observed != ["advance"] else []
        replayed += recorder.see(events, now_ns)[1]
        for asked in questions:
            replayed += [asked, recorder.answer(asked.strip().removeprefix(_QUESTION))]
    return "\n".join([*replayed, ""])
