"""What can be tuned in a model's configuration, which values are tried, and how a value is put into it. Pure.

Values are words ("4", "off", "auto", "4+8"), as they are on the command line, in the checkpoint and in reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf import text_format

from charonia.errors import ConfigError, InvalidArgument
from charonia.models.config_forms import parse
from protos.model_config_pb2 import ModelConfig, ModelInstanceGroup

from .configuration_search import Axis

INSTANCES, THREADS, MAX_BATCH, DELAY, PREFERRED, CACHE = (
    "instances", "threads", "max-batch", "delay-us", "preferred", "cache",
)  # fmt: skip
KNOBS = (INSTANCES, THREADS, MAX_BATCH, DELAY, PREFERRED, CACHE)
"""In the order in which a quick search goes through them: those first that change most."""

OFF, ON, AUTO, MAX, HALF, KEEP = "off", "on", "auto", "max", "half", "keep"

_THREADS = {"onnxruntime": "intra_op_thread_count", "openvino": "INFERENCE_NUM_THREADS"}
"""The parameter that says how many threads a backend computes with."""
_DELAYS_US = (0, 500, 1000, 2000, 5000, 10_000)
_LARGEST_BATCH = 64
_LARGEST = 2**31 - 1
_GPU_INSTANCES = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Dimension:
    """A knob of a model, its values, and which of them is written in its configuration (`start`)."""

    model: str
    knob: str
    values: tuple[str, ...]
    start: int

    @property
    def axis(self) -> Axis:
        return Axis(len(self.values), self.knob in (INSTANCES, THREADS, MAX_BATCH, DELAY))


Settings = dict[tuple[str, str], str]
"""Values by (model, knob)."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Cores of the machine, inferences that the load has in flight, batch of a request: defaults depend on them."""

    cores: int
    in_flight: int
    batch: int


def dimensions(
    model: str, loaded: ModelConfig, wanted: Mapping[str, Sequence[str]], around: Circumstances
) -> tuple[list[Dimension], list[str]]:
    """The dimensions of a model, of which `loaded` is the configuration that a server completed, and notes about knobs
    that it has not. `wanted` are values by knob: without, defaults; `keep` leaves a knob as it is.

    The written value is always among them. Raises `InvalidArgument` for values that the knob cannot have.
    """
    found, notes = [], []
    for knob in KNOBS:
        values = list(wanted.get(knob, ()))
        if values == [KEEP]:
            continue
        written, why_not = _WRITTEN[knob](loaded)
        if written is None:
            if values:
                notes.append(f"'{model}': {knob} is not tuned, {why_not}")
            continue
        values = values or _defaults(knob, written, loaded, around)
        for value in values:
            _check(knob, value, around)
        if knob == DELAY and written != OFF and OFF in values:
            raise InvalidArgument(f"'{model}' batches dynamically: 'off' of --delay-us would drop its queue's rules")
        values = list(dict.fromkeys([*values, written]))
        if knob in (INSTANCES, THREADS, MAX_BATCH, DELAY):
            values.sort(key=lambda value: -1 if value in (OFF, AUTO) else int(value))
        if len(values) > 1:
            found.append(Dimension(model, knob, tuple(values), values.index(written)))
    return found, notes


def parsed_values(knob: str, text: str) -> list[str]:
    """The words of an option, `1,2,4`. Raises `InvalidArgument` for those that the knob cannot have."""
    values = [word.strip() for word in text.split(",") if word.strip()]
    if not values:
        raise InvalidArgument(f"--{knob} '{text}' is no list of values")
    if KEEP in values and len(values) > 1:
        raise InvalidArgument(
            f"--{knob} '{text}': 'keep' stands alone. The written value is tried beside others by itself"
        )
    for value in values:
        if value != KEEP:
            _check(knob, value, None)
    return list(dict.fromkeys(values))


def applied(written: ModelConfig, loaded: ModelConfig, settings: Mapping[str, str]) -> ModelConfig:
    """The configuration as `written` with values by knob. What has its loaded value already is left as written."""
    made = ModelConfig()
    made.CopyFrom(written)
    before = {knob: _WRITTEN[knob](loaded)[0] for knob in settings}
    for knob in KNOBS:  # preferred sizes depend on what the knobs before them are
        if knob in settings and (settings[knob] != before[knob] or knob == PREFERRED):
            _APPLY[knob](made, loaded, settings[knob])
    return made


def identity(config: ModelConfig) -> str:
    """A text that is equal for configurations that are."""
    return text_format.MessageToString(config, as_one_line=True)


def config_of(text: str, name: str) -> ModelConfig:
    """The message of a `config.pbtxt`. Raises `InvalidArgument`."""
    try:
        return parse(text)
    except ConfigError as error:
        raise InvalidArgument(f"the config.pbtxt of '{name}' cannot be read: {error}") from None


def _check(knob: str, value: str, around: Circumstances | None) -> None:
    number = int(value) if value.isascii() and value.isdecimal() and len(value) < 11 else -1
    match knob:
        case "instances" | "max-batch":
            good = 1 <= number <= _LARGEST
        case "threads":
            good = value == AUTO or 1 <= number <= _LARGEST
        case "delay-us":
            good = value == OFF or 0 <= number <= _LARGEST
        case "preferred":
            sizes = value.split("+")
            good = value in (MAX, HALF) or all(size.isdecimal() and 0 < int(size) <= _LARGEST for size in sizes)
        case _:
            good = value in (ON, OFF)
    if not good:
        raise InvalidArgument(f"--{knob} cannot be '{value}'")
    if knob == MAX_BATCH and around is not None and number < around.batch:
        raise InvalidArgument(f"--max-batch {value} is less than the batch of a request, {around.batch}")


# -- what is written ---------------------------------------------------------------------------------------------------

_Written = tuple[str | None, str]


def _written_instances(config: ModelConfig) -> _Written:
    if len(config.instance_group) != 1:
        return None, f"it has {len(config.instance_group)} instance groups"
    if config.instance_group[0].kind == ModelInstanceGroup.KIND_MODEL:
        return None, "its instances are the model's own"
    return str(max(1, config.instance_group[0].count)), ""


def _written_threads(config: ModelConfig) -> _Written:
    name = _THREADS.get(config.backend)
    if name is None:
        return None, f"no parameter of the backend '{config.backend}' is known to be its threads"
    value = config.parameters[name].string_value if name in config.parameters else ""
    return (value if value.isdecimal() and int(value) > 0 else AUTO), ""


def _written_max_batch(config: ModelConfig) -> _Written:
    return (str(config.max_batch_size), "") if config.max_batch_size > 0 else (None, "its requests are not batched")


def _batches_dynamically(config: ModelConfig) -> str:
    """Why not, empty if it does or could."""
    if config.max_batch_size <= 0:
        return "its requests are not batched"
    if config.WhichOneof("scheduling_choice") not in (None, "dynamic_batching"):
        return "it has another scheduler"
    return ""


def _written_delay(config: ModelConfig) -> _Written:
    if why_not := _batches_dynamically(config):
        return None, why_not
    if not config.HasField("dynamic_batching"):
        return OFF, ""
    return str(config.dynamic_batching.max_queue_delay_microseconds), ""


def _written_preferred(config: ModelConfig) -> _Written:
    if why_not := _batches_dynamically(config):
        return None, why_not
    sizes = list(config.dynamic_batching.preferred_batch_size)
    return (MAX if sizes in ([], [config.max_batch_size]) else "+".join(map(str, sizes))), ""


def _written_cache(config: ModelConfig) -> _Written:
    if config.WhichOneof("scheduling_choice") == "sequence_batching" or config.model_transaction_policy.decoupled:
        return None, "responses of sequences and streams are not cached"
    return (ON if config.response_cache.enable else OFF), ""


_WRITTEN: dict[str, Callable[[ModelConfig], _Written]] = {
    INSTANCES: _written_instances, THREADS: _written_threads, MAX_BATCH: _written_max_batch, DELAY: _written_delay,
    PREFERRED: _written_preferred, CACHE: _written_cache,
}  # fmt: skip


def _defaults(knob: str, written: str, config: ModelConfig, around: Circumstances) -> list[str]:
    match knob:
        case "instances":
            if config.instance_group[0].kind == ModelInstanceGroup.KIND_GPU:
                return list(map(str, _GPU_INSTANCES))
            return _powers(1, max(2, around.cores))
        case "threads":
            return [AUTO, *_powers(1, around.cores)]
        case "max-batch":
            return _powers(around.batch, max(int(written), min(_LARGEST_BATCH, around.in_flight)))
        case "delay-us":
            return list(map(str, _DELAYS_US))
        case "preferred":
            return [MAX, HALF]
        case _:
            return []  # whether requests repeat is not known here: the cache is tuned on demand


def _powers(low: int, high: int) -> list[str]:
    value, found = 1, []
    while value <= high:
        if value >= low:
            found.append(str(value))
        value *= 2
    return found or [str(low)]


# -- putting a value in ------------------------------------------------------------------------------------------------


def _apply_instances(made: ModelConfig, loaded: ModelConfig, value: str) -> None:
    if not made.instance_group:
        made.instance_group.add(kind=loaded.instance_group[0].kind)
    made.instance_group[0].count = int(value)


def _apply_threads(made: ModelConfig, loaded: ModelConfig, value: str) -> None:
    name = _THREADS[loaded.backend]
    if value == AUTO:
        made.parameters.pop(name, None)
    else:
        made.parameters[name].string_value = value


def _apply_max_batch(made: ModelConfig, _loaded: ModelConfig, value: str) -> None:
    made.max_batch_size = int(value)


def _apply_delay(made: ModelConfig, loaded: ModelConfig, value: str) -> None:
    if value == OFF:
        made.ClearField("dynamic_batching")
        return
    if not made.HasField("dynamic_batching"):
        made.dynamic_batching.CopyFrom(loaded.dynamic_batching)
    made.dynamic_batching.max_queue_delay_microseconds = int(value)


def _apply_preferred(made: ModelConfig, loaded: ModelConfig, value: str) -> None:
    """Sizes that the model's batches cannot have, or that every batch has, are left out. Without sizes a server takes
    the largest batch, which follows the knob `max-batch`."""
    if not made.HasField("dynamic_batching"):
        return
    most = made.max_batch_size or loaded.max_batch_size
    words = {MAX: [], HALF: [most // 2, most]}
    sizes = words[value] if value in words else [int(word) for word in value.split("+")]
    kept = [size for size in dict.fromkeys(sizes) if 1 < size <= most]
    del made.dynamic_batching.preferred_batch_size[:]
    made.dynamic_batching.preferred_batch_size.extend(kept if kept != [most] else [])


def _apply_cache(made: ModelConfig, _loaded: ModelConfig, value: str) -> None:
    made.response_cache.enable = value == ON


_APPLY: dict[str, Callable[[ModelConfig, ModelConfig, str], None]] = {
    INSTANCES: _apply_instances, THREADS: _apply_threads, MAX_BATCH: _apply_max_batch, DELAY: _apply_delay,
    PREFERRED: _apply_preferred, CACHE: _apply_cache,
}  # fmt: skip
