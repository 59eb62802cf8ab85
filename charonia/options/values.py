"""The values of the command line's options (`table`), for each role.

Parsing only: strings in, checked values out. `--flag=value` and `--flag value` are the same; a repeated scalar's last
value wins (V3); options that Triton repeats gather a list. An option that is known but not built yet says so. Values
come from the flag, else `CHARONIA_<NAME>` in the environment, else the file of `--config`, else the default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from charonia.errors import StartupError, without_credentials

from .cloud_options import vertex_ai_defaults
from .table import ALIASES, ANY, BATCHER, CONSOLE, EXECUTOR, GATEWAY, OPTIONS, RANGES, SERVE, WEBHOOKS, Option

__all__ = [
    "BATCHER",
    "CONSOLE",
    "EXECUTOR",
    "GATEWAY",
    "OPTIONS",
    "SERVE",
    "WEBHOOKS",
    "Option",
    "Values",
    "options_of",
    "parse",
    "render",
    "usage",
]

_TRUE = {"true", "1", "on", "yes"}
_FALSE = {"false", "0", "off", "no"}

Values = dict[str, Any]

_BY_NAME = {option.name: option for option in OPTIONS}


def options_of(role: str) -> list[Option]:
    """The built options a role takes, in the table's order."""
    return [option for option in OPTIONS if role in option.roles and option.built]


def parse(role: str, argv: Sequence[str], environment: Mapping[str, str], file: Mapping[str, Any]) -> Values:
    """The values of every option of `role`, by key. Raises `StartupError` with one sentence."""
    given = _flags(role, argv)
    values: Values = {}
    of_vertex_ai = vertex_ai_defaults(environment)
    for option in options_of(role):
        if option.name in given:
            values[option.key] = _repeated(option, given[option.name], f"--{option.name}")
            continue
        variable = option.variable
        if variable in environment:
            raw = (
                [part for part in environment[variable].split("\n") if part]
                if option.repeat
                else [environment[variable]]
            )
            values[option.key] = _repeated(option, raw, variable)
        elif option.name in file:
            entry = file[option.name]
            raw = [str(part) for part in (entry if isinstance(entry, list) else [entry])]
            values[option.key] = _repeated(option, raw, f"'{option.name}' in the configuration file")
        elif option.name in of_vertex_ai:
            text, variable = of_vertex_ai[option.name]
            values[option.key] = _repeated(option, [text], variable)
        else:
            values[option.key] = option.default
    for name in file:
        if name not in _BY_NAME:
            raise StartupError(f"unknown option '{name}' in the configuration file")
        if not _BY_NAME[name].built:
            raise StartupError(_not_built(f"'{name}' in the configuration file"))
    for option in OPTIONS:
        if not option.built and option.variable in environment:
            raise StartupError(_not_built(f"'{option.variable}' in the environment"))
    return values


def _not_built(what: str) -> str:
    return f"option {what} is known but not supported by this release yet; remove it to go on"


def _flags(role: str, argv: Sequence[str]) -> dict[str, list[str]]:
    given: dict[str, list[str]] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise StartupError(
                f"unexpected argument '{without_credentials(word)}': options are written --name=value or --name value"
            )
        name, equals, value = word[2:].partition("=")
        name = ALIASES.get(name, name)
        option = _BY_NAME.get(name)
        if option is None or (option.built and role not in option.roles):
            raise StartupError(
                f"unknown option '--{without_credentials(name)}'; 'charonia {role} --help' lists the options"
            )
        if not option.built:
            raise StartupError(_not_built(f"'--{name}'"))
        if not equals:
            if option.kind == "flag" or (option.kind == "bool" and (not rest or rest[0].startswith("--"))):
                value = "true"
            elif rest:
                value = rest.pop(0)
            else:
                raise StartupError(f"option '--{name}' needs a value")
        given.setdefault(name, []).append(value)
    return given


def _repeated(option: Option, raw: Sequence[str], where: str) -> Any:
    if option.repeat:
        return tuple(raw)
    return _value(option, raw[-1], where)


def _value(option: Option, text: str, where: str) -> Any:
    if option.kind in ("int", "float"):
        if option.name == "log-verbose" and text.lower() in ("true", "false"):
            text = "1" if text.lower() == "true" else "0"  # as in Triton
        try:
            number = int(text) if option.kind == "int" else float(text)
        except ValueError:
            raise StartupError(f"{where} must be a number, got '{text}'") from None
        least, most = (0, 65535) if option.name.endswith("-port") else RANGES.get(option.name, ANY)
        if not least <= number <= most:
            bound = f"between {least} and {most}" if most < ANY[1] else f"at least {least}"
            raise StartupError(f"{where} must be {bound}, got '{text}'")
        return number
    if option.kind in ("bool", "flag"):
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise StartupError(f"{where} must be true or false, got '{text}'")
    return text


def render(role: str, values: Values, environment: Mapping[str, str] | None = None) -> list[str]:
    """The flags that give `role` these values again in an environment: how serve hands its options to its parts.

    What the parts see of the environment has no options' variables.
    """
    argv: list[str] = []
    of_vertex_ai = vertex_ai_defaults(environment or {})
    for option in options_of(role):
        is_default = values.get(option.key, option.default) == option.default
        if option.key not in values or (is_default and option.name not in of_vertex_ai):
            continue
        entries = values[option.key] if option.repeat else (values[option.key],)
        for entry in entries:
            text = str(entry).lower() if isinstance(entry, bool) else str(entry)
            argv.append(f"--{option.name}={text}")
    return argv


def usage(role: str) -> str:
    """The option list of `--help`."""
    lines = []
    for option in options_of(role):
        default = "" if option.default in ("", (), None, False) else f" (default {option.default})"
        value = "" if option.kind == "flag" else " " + option.kind.upper()
        lines.append(f"  --{option.name}{value}\n        {option.help}{default}")
    return "\n".join(lines)
