"""Metrics of the program itself that `Server.metrics` shows beside the server's: families of counters and gauges.

They are this process's, and every server of it shows them, as those of Triton's library.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from weakref import WeakValueDictionary

from charonia.metrics.exposition import merge

from .kinds import InternalError, InvalidArgumentError, MetricKind, UnsupportedError

_lock = threading.RLock()
_families: dict[str, MetricFamily] = {}


class _Series:
    """What metrics with equal labels share."""

    def __init__(self) -> None:
        self.value = 0.0


class MetricFamily:
    """Metrics with one name, of which a process has one family."""

    def __init__(self, kind: MetricKind, name: str, description: str) -> None:
        """Raises `InvalidArgumentError` for a name that no metric can have, or that is of another kind already."""
        if not (name.isascii() and name.replace(":", "_").isidentifier()):
            raise InvalidArgumentError(f"'{name}' cannot be the name of a metric")
        self.name, self.kind, self.description = name, MetricKind(kind), description
        self._series: WeakValueDictionary[tuple[tuple[str, str], ...], _Series] = WeakValueDictionary()
        with _lock:
            known = _families.get(name)
            if known is not None and known.kind is not self.kind:
                raise InvalidArgumentError(f"'{name}' is the name of another metric, a {known.kind.name}")
            if known is not None:
                self._series = known._series
            else:
                _families[name] = self

    def _page(self) -> str:
        head = f"# HELP {self.name} {_escaped(self.description)}\n# TYPE {self.name} {self.kind.name.lower()}\n"
        lines = []
        for labels, series in sorted(self._series.items()):
            pairs = ",".join(f'{name}="{_escaped(value, quoted=True)}"' for name, value in labels)
            lines.append(f"{self.name}{{{pairs}}} {series.value}\n" if pairs else f"{self.name} {series.value}\n")
        return head + "".join(lines) if lines else ""


class Metric:
    """One metric of a family; it is shown as long as it exists."""

    def __init__(self, family: MetricFamily, labels: Mapping[str, str] | None = None) -> None:
        """Raises `InvalidArgumentError` for labels that are no text."""
        for name, value in (labels or {}).items():
            if not isinstance(value, str):
                raise InvalidArgumentError(
                    f"Parameter [{name}] must have a type of TRITONSERVER_PARAMETER_STRING to be added as a label."
                )
            if not (name.isascii() and name.isidentifier()):
                raise InvalidArgumentError(f"'{name}' cannot be the name of a label")
        self._family = family
        with _lock:
            key = tuple(sorted((labels or {}).items()))
            self._series = family._series.setdefault(key, _Series())

    @property
    def kind(self) -> MetricKind:
        return self._family.kind

    @property
    def value(self) -> float:
        return self._series.value

    def increment(self, value: float) -> None:
        """Add to it; a counter takes nothing below 0."""
        if self.kind is MetricKind.COUNTER and not value >= 0:
            raise InvalidArgumentError(
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
            )
        with _lock:
            self._series.value += value

    def set_value(self, value: float) -> None:
        """Set a gauge."""
        if self.kind is MetricKind.COUNTER:
            raise UnsupportedError("TRITONSERVER_METRIC_KIND_COUNTER does not support Set")
        with _lock:
            self._series.value = float(value)


def custom_page() -> str:
    """All of them in Prometheus's text format; "" for none."""
    with _lock:
        pages = [family._page() for family in _families.values()]
    try:
        return merge([page for page in pages if page]).decode() if any(pages) else ""
    except ValueError as error:
        raise InternalError(f"metrics cannot be written: {error}") from None


def _escaped(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text
