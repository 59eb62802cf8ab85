"""The settings of tracing: which requests are traced, what is recorded, and where it goes (N1, N2, H44, G15). Pure.

Settings at start hold for all models. A change at run time sets fields for one model or for all, and a field that is
reset has its earlier value again. Changes hold for every gateway (`charonia.facts.events.TraceSettingChanged`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from charonia.errors import InvalidArgument, Unsupported

from .contexts import TENSORS, TIMESTAMPS

TRITON, OPENTELEMETRY = "triton", "opentelemetry"
OFF = "OFF"
LEVELS = {"TIMESTAMPS": TIMESTAMPS, "TENSORS": TENSORS}
"""Level by name, in the order of replies."""

_MOST_UNSIGNED = 2**32 - 1
_MOST_COUNT = 2**31 - 1

Wanted = Mapping[str, Sequence[str] | None]
"""A change in either protocol: field to values; None or empty to reset it."""


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """The settings for a model. `level` are bits of `LEVELS`, 0 for OFF; every `rate`th request is traced, 0 for none.

    At most `count` requests are traced, -1 for no bound; each file gets `log_frequency` traces, 0 for one file.
    """

    level: int = 0
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Options that are fixed at start. `resource` are attributes of every span; `bsp_schedule_delay` is in ms."""

    mode: str = TRITON
    file: str = ""
    initial: TraceSettings = TraceSettings()
    url: str = "http://localhost:4318/v1/traces"
    resource: tuple[tuple[str, str], ...] = ()
    bsp_max_queue_size: int = 2048
    bsp_schedule_delay: int = 5000
    bsp_max_export_batch_size: int = 512

    @property
    def leads_somewhere(self) -> bool:
        """Whether traces are written anywhere."""
        return self.mode == OPENTELEMETRY or bool(self.file)


NAMES = {"trace_level": "level", "trace_rate": "rate", "trace_count": "count", "log_frequency": "log_frequency"}
"""The settings that can be changed, by their names in the protocols."""
_FIELDS = tuple(field.name for field in fields(TraceSettings))


def read_change(wanted: Wanted) -> dict[str, int | None]:
    """A change by field; None resets. Unknown fields are ignored. Raises H44's and G15's errors."""
    if "trace_file" in wanted:
        raise Unsupported("trace file location can not be updated through network protocol")
    change: dict[str, int | None] = {}
    for name, field in NAMES.items():
        if name not in wanted:
            continue
        values = wanted[name]
        if not values:
            change[field] = None
        elif field == "level":
            change[field] = read_level(values)
        elif len(values) > 1:
            raise InvalidArgument(f"expect only 1 value for '{name}'")
        else:
            change[field] = _number(name, values[0])
    return change


def read_level(values: Sequence[str]) -> int:
    """The bits of levels. Raises `InvalidArgument` for OFF beside another level, and for an unknown one."""
    if OFF in values:
        if len(values) > 1:
            raise InvalidArgument("Expect only one trace level 'OFF' is specified")
        return 0
    level = 0
    for value in values:
        if value not in LEVELS:
            raise InvalidArgument(f"Unable to parse 'trace_level', got: {value[:64]}")
        level |= LEVELS[value]
    return level


def _number(name: str, text: str) -> int:
    try:
        number = int(text) if text.isascii() and len(text) <= 64 else None
    except ValueError:
        number = None
    if number is None:
        raise InvalidArgument(f"Unable to parse '{name}', got: {text[:64]}")
    least, most = (-1, _MOST_COUNT) if name == "trace_count" else (0, _MOST_UNSIGNED)
    if name == "trace_count" and number < least:
        raise InvalidArgument(f"Unable to parse 'trace_count'. Expecting value >= -1, got:{text}")
    if not least <= number <= most:
        raise InvalidArgument(f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {text}")
    return number


def changed(known: Mapping[str, int], change: Mapping[str, int | None]) -> dict[str, int]:
    """The changes for one model, or for all, after another change."""
    merged = {**known, **{field: value for field, value in change.items() if value is not None}}
    return {field: value for field, value in merged.items() if change.get(field, value) is not None}


def applied(settings: TraceSettings, said: Mapping[str, int]) -> TraceSettings:
    """The settings after changes; those of a newer release are ignored."""
    return replace(settings, **{field: value for field, value in said.items() if field in _FIELDS})


def check(options: TraceOptions, settings: TraceSettings) -> None:
    """Raises `InvalidArgument` for changed settings that trace nothing, unless their level is OFF (H44)."""
    if not settings.level:
        return
    if not settings.rate:
        raise InvalidArgument("Attempting to set invalid trace setting :sample rate must be non-zero")
    if not options.leads_somewhere:
        raise InvalidArgument("Attempting to set invalid trace setting :trace file name is not given")


def reply(options: TraceOptions, settings: TraceSettings) -> dict[str, list[str]]:
    """The full setting, as values by name, in the order of H44's reply."""
    levels = [name for name, bit in LEVELS.items() if settings.level & bit]
    told = {
        "trace_level": levels or [OFF],
        "trace_rate": [str(settings.rate)],
        "trace_count": [str(settings.count)],
    }
    if options.mode == TRITON:
        return told | {
            "log_frequency": [str(settings.log_frequency)],
            "trace_file": [options.file],
            "trace_mode": [options.mode],
        }
    told |= {
        "trace_mode": [options.mode],
        "bsp_max_export_batch_size": [str(options.bsp_max_export_batch_size)],
        "bsp_max_queue_size": [str(options.bsp_max_queue_size)],
        "bsp_schedule_delay": [str(options.bsp_schedule_delay)],
        "url": [options.url],
    }
    if options.resource:
        told["resource"] = [",".join(f"{key}={value}" for key, value in options.resource)]
    return told
