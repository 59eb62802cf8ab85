"""Writes the page of all options from the table that the command line is made of (`charonia/options/table.py`)."""

from __future__ import annotations

from pathlib import Path

from charonia.options.table import OPTIONS, SERVE, Option
from docs_site.http_pages import prose

PAGE = "reference/options.md"
_ROLES = len(frozenset[str]().union(*(option.roles for option in OPTIONS)))
_ABOUT = """# Options

Each option is a flag, an environment variable and a key of a TOML file (`--config`), in this order of precedence: of
`--http-port` the variable is `CHARONIA_HTTP_PORT` and the key `http-port`.
Names that Triton has are Triton's. `charonia COMMAND --help` lists those of one command.
"""


def write(target: Path) -> None:
    """Writes the page below `target`."""
    (target / PAGE).parent.mkdir(parents=True, exist_ok=True)
    (target / PAGE).write_text(options_page(OPTIONS))


def options_page(options: tuple[Option, ...]) -> str:
    """The text of the page: one row for each option that is built."""
    rows = [_row(option) for option in sorted(options, key=lambda one: one.name) if option.built]
    return "\n".join([_ABOUT, "| option | default | commands | what |", "|---|---|---|---|", *rows, ""])


def _row(option: Option) -> str:
    roles = (
        "all" if len(option.roles) == _ROLES else ", ".join(sorted(option.roles, key=lambda one: (one != SERVE, one)))
    )
    about = prose(option.help).replace("|", "\\|")
    more = " (may be repeated)" if option.repeat and "repeat" not in option.help else ""
    return f"| `--{option.name}` | {_default(option)} | {roles} | {about}{more} |"


def _default(option: Option) -> str:
    if option.kind == "flag":
        return "off"
    if option.default in ((), None, ""):
        return ""
    return f"`{str(option.default).lower() if isinstance(option.default, bool) else option.default}`"
