"""What-if questions: changes of a model's setting and load, as words, and what they make of it. Pure.

    instances=2 executors=+1 batcher=separate cores=4 delay=5ms max-batch=16 preferred=4,8 rate=x3
    policy=max-queue:64,timeout:20ms,action:reject

A word may name the only model it is about, as in `resnet:instances=2`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from charonia.errors import InvalidArgument
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching, QueuePolicy, TimeoutAction

from .recorded_requests import RecordedRequest
from .simulated_run import Setting

NAMES = ("executors", "batcher", "instances", "delay", "max-batch", "preferred", "cores", "rate", "policy")
_UNITS_US = {"us": 1.0, "ms": 1e3, "s": 1e6, "": 1e3}
_MOST = 10_000
_MAX_RATE = 1000.0
_LEAST_CORES = 0.01
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|)")
_WORD = re.compile(r"(?:(?P<model>[^=]*):)?(?P<name>[a-z-]+)=(?P<value>.+)")


@dataclass(frozen=True, slots=True)
class Change:
    """One change, of `model` alone or of all (""). Its value was checked."""

    name: str
    value: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Changes that are made together. `text` is how the question was put."""

    text: str
    changes: tuple[Change, ...]


def what_if(text: str) -> WhatIf:
    """The question that the words of `text` are. Raises `InvalidArgument`."""
    words = text.split()
    if not words:
        raise InvalidArgument("a what-if names at least one change, as in 'instances=2 delay=5ms'")
    changes = []
    for word in words:
        found = _WORD.fullmatch(word)
        if found is None or found["name"] not in NAMES:
            raise InvalidArgument(f"'{word}' is no change: write NAME=VALUE, with NAME one of {', '.join(NAMES)}")
        change = Change(found["name"], found["value"], found["model"] or "")
        _check(change)
        changes.append(change)
    return WhatIf(" ".join(words), tuple(changes))


def changed(
    setting: Setting, arrivals: Sequence[RecordedRequest], question: WhatIf
) -> tuple[Setting, Sequence[RecordedRequest]]:
    """The setting and the arrivals with what a question changes of this model."""
    for change in question.changes:
        if change.model in ("", setting.interface.name):
            if change.name == "rate":
                arrivals = at_rate(arrivals, _factor(change.value))
            else:
                setting = _APPLY[change.name](setting, change.value)
    return setting, arrivals


def at_rate(arrivals: Sequence[RecordedRequest], factor: float) -> list[RecordedRequest]:
    """The same requests, their distances divided by `factor`: the pattern stays and takes less time."""
    if not arrivals:
        return []
    begin = arrivals[0].arrived_ns
    return [replace(one, arrived_ns=begin + round((one.arrived_ns - begin) / factor)) for one in arrivals]


# -- changes -----------------------------------------------------------------------------------------------------------


def _check(change: Change) -> None:
    if change.name == "rate":
        _factor(change.value)
    else:
        _APPLY[change.name](_ANY, change.value)


def _executors(setting: Setting, value: str) -> Setting:
    """A single executor has the batcher in its process and is given no batch ahead, several are, as `serve` has it;
    unless the executors were started apart, as their batcher is then.
    """
    executors = _counted("executors", setting.executors, value)
    if executors == setting.executors:
        return setting
    hosts = executors == 1 and not setting.keeps_apart
    return replace(setting, executors=executors, prefetch=0 if hosts else max(1, setting.prefetch))


def _batcher(setting: Setting, value: str) -> Setting:
    """Where the batcher is, as `--batcher` of `serve` has it."""
    if value not in ("separate", "colocated"):
        raise InvalidArgument(f"batcher '{value}' is neither separate nor colocated")
    if value == "separate":
        return replace(setting, prefetch=max(1, setting.prefetch), keeps_apart=True)
    if setting.executors > 1 and setting is not _ANY:
        raise InvalidArgument("batcher=colocated needs executors=1, before it: several executors share one batcher")
    return replace(setting, prefetch=0, keeps_apart=False)


def _instances(setting: Setting, value: str) -> Setting:
    return replace(setting, instances=_counted("instances", setting.instances, value))


def _delay(setting: Setting, value: str) -> Setting:
    return _batching(setting, max_queue_delay_us=duration_us("delay", value))


def _max_batch(setting: Setting, value: str) -> Setting:
    rows = _whole("max-batch", value, 1)
    interface = replace(setting.interface, max_batch_size=rows)
    block = interface.dynamic_batching
    if block is not None:  # larger ones are never formed
        kept = tuple(size for size in block.preferred_batch_sizes if size <= rows)
        interface = replace(interface, dynamic_batching=replace(block, preferred_batch_sizes=kept))
    return replace(setting, interface=interface)


def _preferred(setting: Setting, value: str) -> Setting:
    sizes = () if value == "none" else tuple(_whole("preferred", part, 1) for part in value.split(","))
    return _batching(setting, preferred_batch_sizes=tuple(sorted(set(sizes))))


def _cores(setting: Setting, value: str) -> Setting:
    try:
        cores = float(value)
    except ValueError:
        cores = 0.0
    if not _LEAST_CORES <= cores <= _MOST:
        raise InvalidArgument(f"cores '{value}' is no number from {_LEAST_CORES} to {_MOST}: write 4, or 1.5")
    return replace(setting, cores=cores)


def _policy(setting: Setting, value: str) -> Setting:
    if value == "none":  # no dynamic batching: each request is a batch
        interface = replace(setting.interface, dynamic_batching=None, scheduling="default")
        return replace(setting, interface=interface)
    block = _block(setting.interface)
    policy = block.default_queue_policy
    parts: dict[str, str] = {}
    for part in value.split(","):
        name, mark, text = part.partition(":")
        if not mark:
            raise InvalidArgument(
                f"the policy '{value}' is not none or NAME:VALUE,..., as in max-queue:64,timeout:20ms"
            )
        parts[name] = text
    for name, text in parts.items():
        match name:
            case "max-queue":
                policy = replace(policy, max_queue_size=_whole("max-queue", text, 0))
            case "timeout":
                policy = replace(policy, default_timeout_us=duration_us("timeout", text))
            case "action" if text in ("reject", "delay"):
                policy = replace(policy, timeout_action=TimeoutAction(text.upper()))
            case "override" if text in ("yes", "no"):
                policy = replace(policy, allow_timeout_override=text == "yes")
            case "order" if text in ("yes", "no"):
                block = replace(block, preserve_ordering=text == "yes")
            case _:
                raise InvalidArgument(
                    f"'{name}:{text}' is no policy: max-queue:N, timeout:TIME, action:reject|delay, override:yes|no or "
                    "order:yes|no"
                )
    return _with_policy(setting, block, policy)


def _with_policy(setting: Setting, block: DynamicBatching, policy: QueuePolicy) -> Setting:
    """One policy for all levels, as the question names none."""
    levels = dict.fromkeys(block.priority_queue_policies, policy)
    block = replace(block, default_queue_policy=policy, priority_queue_policies=levels)
    return replace(setting, interface=_with_block(setting.interface, block))


_APPLY = {
    "executors": _executors,
    "batcher": _batcher,
    "instances": _instances,
    "delay": _delay,
    "max-batch": _max_batch,
    "preferred": _preferred,
    "cores": _cores,
    "policy": _policy,
}
_ANY = Setting(ModelInterface("", "", "", _MOST, {}, {}, dynamic_batching=DynamicBatching()), _MOST, _MOST)
"""What a change is tried on before it is known of which model it is."""


def _batching(setting: Setting, **fields: object) -> Setting:
    block = replace(_block(setting.interface), **fields)  # type: ignore[arg-type]
    return replace(setting, interface=_with_block(setting.interface, block))


def _block(interface: ModelInterface) -> DynamicBatching:
    return interface.dynamic_batching or DynamicBatching()


def _with_block(interface: ModelInterface, block: DynamicBatching) -> ModelInterface:
    return replace(interface, dynamic_batching=block, scheduling="dynamic_batching")


# -- values ------------------------------------------------------------------------------------------------------------


def duration_us(name: str, text: str) -> int:
    """A time in microseconds; without a unit it is in milliseconds. Raises `InvalidArgument`."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise InvalidArgument(f"{name} '{text}' is no time: write 5ms, 500us or 1s")
    return round(float(found[1]) * _UNITS_US[found[2]])


def _counted(name: str, before: int, value: str) -> int:
    """`3`, or `+2` and `-1` from what there was."""
    if value[:1] in "+-":
        after = before + (1 if value[0] == "+" else -1) * _whole(name, value[1:], 0)
        if after < 1:
            raise InvalidArgument(f"{name}={value} leaves {after}: at least 1 is needed")
        return min(after, 2 * _MOST)
    return _whole(name, value, 1)


def _whole(name: str, text: str, least: int) -> int:
    if not text.isascii() or not text.isdecimal() or not least <= int(text) <= _MOST:
        raise InvalidArgument(f"{name} '{text}' is no whole number from {least} to {_MOST}")
    return int(text)


def _factor(text: str) -> float:
    try:
        factor = float(text.removeprefix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor <= _MAX_RATE:
        raise InvalidArgument(f"rate '{text}' is no factor: write x3, or x0.5 for half the rate")
    return factor


def settings_text(setting: Setting) -> str:
    """A setting in one line, in the words of changes."""
    block = setting.interface.dynamic_batching
    words = [
        f"executors={setting.executors}",
        f"instances={setting.instances}",
        f"max-batch={setting.interface.max_batch_size}",
    ]
    if setting.cores:
        words.append(f"cores={setting.cores:g}")
    if block is None:
        return " ".join([*words, "policy=none"])
    words.append(f"delay={block.max_queue_delay_us}us")
    if block.preferred_batch_sizes:
        words.append("preferred=" + ",".join(map(str, block.preferred_batch_sizes)))
    return " ".join(words)


def named_models(questions: Sequence[WhatIf], known: Mapping[str, object]) -> None:
    """Raises `InvalidArgument` when a question is about a model that is not among the recorded ones in `known`."""
    for question in questions:
        for change in question.changes:
            if change.model and change.model not in known:
                names = ", ".join(f"'{name}'" for name in sorted(known))
                raise InvalidArgument(
                    f"'{question.text}' is about '{change.model}', of which nothing was recorded: there is {names}"
                )
