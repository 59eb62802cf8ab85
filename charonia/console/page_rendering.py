"""Renders pages and their live regions from the templates, and formats numbers for people.

Pure but for the templates, which are read when they are first used.
Everything that comes from the log is escaped; templates hold no script and no style of their own, which the content
security policy of `web_app` would refuse anyway.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

HERE = Path(__file__).parent
_SI = ("", "k", "M", "G", "T")


class PageRenderer:
    """The templates, loaded once."""

    def __init__(self) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {
            "ago": ago,
            "amount": amount,
            "clock": clock,
            "duration": duration,
            "milliseconds": milliseconds,
            "percent": percent,
            "pretty": pretty,
            "size": size,
            "short": short,
            "ending": ending,
        }

    def page(self, name: str, **values: Any) -> str:
        """A whole page: `templates/<name>.html`."""
        return str(self._environment.get_template(f"{name}.html").render(**values))

    def region(self, name: str, **values: Any) -> str:
        """A part of a page that is replaced while it is open: `templates/parts/<name>.html`."""
        return str(self._environment.get_template(f"parts/{name}.html").render(**values))


def amount(value: float | None) -> str:
    """A number with three digits that count: 1.23k."""
    if value is None:
        return "–"
    for unit in _SI:
        if abs(value) < 999.5 or unit == _SI[-1]:
            return f"{value:.0f}{unit}" if value == int(value) and abs(value) < 1000 else f"{value:.3g}{unit}"
        value /= 1000
    raise AssertionError("the last unit takes every number")


def percent(share: float | None) -> str:
    """A share of 1, in percent without digits behind the point."""
    return "–" if share is None else f"{share * 100:.0f}\u00a0%"


def size(value: float | None) -> str:
    """Bytes in powers of 1024."""
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def milliseconds(value: float | None) -> str:
    """A duration given in milliseconds."""
    return "–" if value is None else duration(value / 1000)


def duration(seconds: float | None) -> str:
    """A duration given in seconds, with three digits that count."""
    if seconds is None:
        return "–"
    if seconds >= 86_400:
        return f"{seconds / 86_400:.3g} d"
    if seconds >= 3_600:
        return f"{seconds / 3_600:.3g} h"
    if seconds >= 100:
        return f"{seconds / 60:.3g} min"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor * 0.9995:
            return f"{seconds / factor:.3g} {unit}"
    return "0" if seconds <= 0 else "< 1 us"


def ago(seconds: float | None) -> str:
    """An age."""
    return "–" if seconds is None else f"{duration(max(0.0, seconds))} ago"


def clock(microseconds: int | None) -> str:
    """A point in time, in UTC, to the millisecond."""
    if not microseconds:
        return "–"
    when = datetime.fromtimestamp(microseconds / 1e6, UTC)
    return f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03d}"


def pretty(value: Any) -> str:
    """JSON over several lines."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def short(text: str, length: int = 12) -> str:
    """The beginning of an id."""
    return text if len(text) <= length else f"{text[:length]}…"


def ending(text: str, length: int = 12) -> str:
    """The last characters of an id: ids of one process begin alike."""
    return text if len(text) <= length else f"…{text[-length:]}"
