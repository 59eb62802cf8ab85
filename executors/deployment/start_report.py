"""Tables of agents, backends and models for the log after the start-up load (R30). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

AGENTS = ("Repository Agent", "Path")
BACKENDS = ("Backend", "Path", "Config")
MODELS = ("Model", "Version", "Status")


def report(
    agents: Iterable[tuple[str, str]],
    backends: Iterable[tuple[str, str, str]],
    models: Iterable[tuple[str, int | None, str]],
) -> str:
    """Return the three tables. The version of a model without one to load is None."""
    versions = [(name, "" if version is None else str(version), status) for name, version, status in models]
    return "\n" + "\n".join((_table(AGENTS, agents), _table(BACKENDS, backends), _table(MODELS, versions)))


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [[" ".join(cell.split()) for cell in row] for row in rows]  # a reason may have lines
    widths = [max(len(row[i]) for row in (heading, *cells)) for i in range(len(heading))]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"

    def line(row: Sequence[str]) -> str:
        return "|" + "|".join(f" {text.ljust(width)} " for text, width in zip(row, widths, strict=True)) + "|"

    return "\n".join([rule, line(heading), rule, *map(line, cells), rule, ""])
