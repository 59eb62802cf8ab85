"""Medians and ratios of rounds. A ratio is of two runs of one round: machines change from minute to minute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from loadtest.measurement import median

from .loops import Run

BASES = {"engine": "library", "generate": "engine", "openai": "engine", "grpc": "engine"}
"""Which way each is compared with."""


@dataclass(frozen=True)
class Ratio:
    """A median over rounds, and its bounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Ratio:
        found = sorted(values)
        return cls(median(found), found[0], found[-1])


@dataclass(frozen=True)
class Row:
    """One way at one number of streams. `against` is the name of the other way, "" when it was not measured.

    `first_more_ms` is how much later the first token came than there.
    """

    streams: int
    way: str
    rounds: int
    rate: float
    first_ms: float
    between_ms: float
    against: str = ""
    rate_ratio: Ratio | None = None
    between_ratio: Ratio | None = None
    first_more_ms: Ratio | None = None


def rows_of(streams: int, runs: Mapping[str, Sequence[Run]]) -> list[Row]:
    """A row for each way, in their order. The runs of all ways are those of the same rounds."""
    return [_row(streams, way, runs) for way in runs]


def _row(streams: int, way: str, runs: Mapping[str, Sequence[Run]]) -> Row:
    mine = runs[way]
    row = Row(
        *(streams, way, len(mine), median(run.rate for run in mine)),
        *(median(run.first_ms for run in mine), median(run.between_ms for run in mine)),
    )
    base = BASES.get(way, "")
    if base not in runs:
        return row
    pairs = list(zip(mine, runs[base], strict=True))
    return Row(
        *(streams, way, row.rounds, row.rate, row.first_ms, row.between_ms, base),
        Ratio.of(run.rate / other.rate for run, other in pairs),
        Ratio.of(run.between_ms / other.between_ms for run, other in pairs),
        Ratio.of(run.first_ms - other.first_ms for run, other in pairs),
    )


def table(rows: Iterable[Row]) -> str:
    """Markdown."""
    lines = [
        "| streams | way | tokens/s | first, ms | between, ms | ratio of tokens/s | of between | first, more ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratios = ["", "", ""]
        if row.rate_ratio is not None and row.between_ratio is not None and row.first_more_ms is not None:
            ratios = [
                f"{_shown(row.rate_ratio)} {row.against}",
                _shown(row.between_ratio),
                _shown(row.first_more_ms, digits=0),
            ]
        figures = (f"{row.rate:.1f}", f"{row.first_ms:.0f}", f"{row.between_ms:.1f}", *ratios)
        lines.append(f"| {row.streams} | {row.way} | {' | '.join(figures)} |")
    return "\n".join(lines)


def document(rows: Iterable[Row], **more: object) -> dict[str, object]:
    """The same for programs."""
    return {**more, "rows": [asdict(row) for row in rows]}


def _shown(ratio: Ratio, digits: int = 2) -> str:
    return f"{ratio.median:.{digits}f} ({ratio.least:.{digits}f} to {ratio.most:.{digits}f})"
