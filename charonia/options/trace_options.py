"""`--trace-config` and its old spellings (N1)."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from charonia.errors import CharoniaError, StartupError, without_credentials
from charonia.traces.trace_settings import OPENTELEMETRY, TRITON, TraceOptions, TraceSettings, read_change

from .values import Values

_log = logging.getLogger(__name__)

_OF_MODE = {
    TRITON: ("file", "log-frequency"),
    OPENTELEMETRY: ("url", "resource", "bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size"),
}
_GLOBAL = ("mode", "level", "rate", "count")


def trace_options(values: Values) -> TraceOptions:
    """The options of tracing. Raises `StartupError` for an unknown setting, or one of the other mode."""
    given = [_setting(entry) for entry in values["trace_config"]] + _old_spellings(values)
    modes = [value for _, key, value in given if key == "mode"] or [mode for mode, _, _ in given if mode] or [TRITON]
    mode = modes[-1]
    if mode not in _OF_MODE:
        raise StartupError(f"--trace-config mode must be {TRITON} or {OPENTELEMETRY}, got '{mode}'")
    options = TraceOptions(mode=mode)
    wanted: dict[str, list[str]] = {}
    numbers: dict[str, Any] = {}
    resource: list[tuple[str, str]] = []
    for of_mode, key, value in given:
        if key == "level":
            wanted.setdefault("trace_level", []).append(value)
        elif key in ("rate", "count"):
            wanted[f"trace_{key}"] = [value]
        elif key == "log-frequency":
            wanted["log_frequency"] = [value]
        elif key == "resource":
            name, equals, attribute = value.partition("=")
            if not equals or not name:
                raise StartupError(f"--trace-config {OPENTELEMETRY},resource must be <key>=<value>, got '{value}'")
            resource.append((name, attribute))
        elif key.startswith("bsp_"):
            if not (value.isascii() and value.isdigit() and 0 < int(value) <= 10_000_000):
                raise StartupError(f"--trace-config {of_mode},{key} must be a number above 0, got '{value}'")
            numbers[key] = int(value)
    texts: dict[str, Any] = {key: value for _, key, value in given if key in ("file", "url")}
    try:
        levels = wanted.get("trace_level", [])
        if len(levels) > 1 and "OFF" in levels:  # each is a flag of its own: the last one counts
            wanted["trace_level"] = ["OFF"] if levels[-1] == "OFF" else [level for level in levels if level != "OFF"]
        said = {field: value for field, value in read_change(wanted).items() if value is not None}
    except CharoniaError as error:
        raise StartupError(f"--trace-config: {error.message}") from None
    options = replace(options, initial=TraceSettings(**said), resource=tuple(resource), **texts, **numbers)
    if options.bsp_max_export_batch_size > options.bsp_max_queue_size:
        raise StartupError("--trace-config bsp_max_export_batch_size must not be more than bsp_max_queue_size")
    if said.get("level") and not options.leads_somewhere:
        _log.warning("nothing is traced: --trace-config triton,file=<path> says where to, or opentelemetry,url=<url>")
    return options


def _setting(entry: str) -> tuple[str, str, str]:
    """(mode or "", key, value) of `<mode>,<key>=<value>` or `<key>=<value>`; a mode alone selects it."""
    if entry in _OF_MODE:
        return "", "mode", entry
    head, equals, value = entry.partition("=")
    mode, comma, key = head.rpartition(",")
    if not equals or (comma and mode not in _OF_MODE):
        shown = without_credentials(entry)  # it may be the URL of a collector
        raise StartupError(f"--trace-config must be <mode>,<key>=<value> or <key>=<value>, got '{shown}'")
    known = _OF_MODE[mode] if mode else _GLOBAL
    if key not in known and not (mode and key in _GLOBAL[1:]):
        where = f"'{mode}'" if mode else "all modes"
        raise StartupError(f"--trace-config has no setting '{key}' of {where}: {', '.join(known)}")
    return mode, key, value


def _old_spellings(values: Values) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    for option, mode, key in (
        ("trace-file", TRITON, "file"),
        ("trace-level", "", "level"),
        ("trace-rate", "", "rate"),
        ("trace-count", "", "count"),
        ("trace-log-frequency", TRITON, "log-frequency"),
    ):
        given = values[option.replace("-", "_")]
        entries = given if isinstance(given, tuple) else (given,) if given else ()
        if entries:
            word = f"{mode},{key}" if mode else key
            _log.warning("--%s is the old spelling of --trace-config %s=<value>", option, word)
        for value in entries:
            # Triton's old levels: MIN and MAX meant TIMESTAMPS
            found.append((mode, key, "TIMESTAMPS" if key == "level" and value in ("MIN", "MAX") else value))
    return found
