"""`charonia audit --verify` and `--export`: all models or some, one after the other, with progress on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from charonia import keys
from charonia.errors import InvalidArgument, InvalidRecord
from charonia.eventlog.port import START, AuditedLog
from charonia.facts.seals import in_order
from charonia.operations.queued import known_models, must_be_known

from .chain_verification import ChainVerification, Head
from .fact_files import FactFile
from .fact_rows import Row, rows_of
from .recorded_heads import add_heads, read_heads

_PAGE = 1000
_MOST_NAMED = 20
"""Unreadable entries that a report names."""
_PROGRESS_S = 1.0


@dataclass(frozen=True, slots=True)
class Span:
    """The entries to export: from `since_ms` to before `until_ms` by the log's clock, 0 for no bound."""

    since_ms: int = 0
    until_ms: int = 0


async def verify_journals(
    log: AuditedLog, models: Sequence[str], heads: Path | None, oldest_unsealed_ms: int = 0
) -> dict[str, Any]:
    """Verify the chains of these models, or of all. `intact` is the verdict.

    `heads` is a file of heads: the chains are compared with it, and if all are intact, theirs are added. Entries before
    `oldest_unsealed_ms` that are not sealed count as a fault of their model (`late`). Raises `NotFound` for an unknown
    model, `InvalidArgument` for a file of heads that is none.
    """
    recorded = read_heads(heads) if heads is not None else {}
    for model in models:
        if model not in recorded:
            await must_be_known(log, model)
    known = await known_models(log)
    progress = _Progress("verify")
    reports: list[dict[str, Any]] = []
    fresh: list[Head] = []
    for model in dict.fromkeys(models) or sorted({*known, *recorded}):
        verification = ChainVerification(log, model, recorded.get(model, {}), progress)
        report = await verification.run()
        since = report["unsealed_since"]
        report["late"] = bool(since) and in_order(since.encode())[0] < oldest_unsealed_ms
        reports.append(report)
        head = verification.head
        if head is not None and head.seal not in recorded.get(model, {}):
            fresh.append(head)
    intact = all(report["intact"] and not report["late"] for report in reports)
    added = heads is not None and intact
    if added and heads is not None and fresh:
        add_heads(heads, fresh)
    return {"intact": intact, "heads_added": len(fresh) if added else 0, "models": reports}


async def export_journals(
    log: AuditedLog, models: Sequence[str], span: Span, path: Path, *, overwrite: bool
) -> dict[str, Any]:
    """Export the facts of these models, or of all, to a file; the kind is its ending's. `whole`: all entries were read.

    Raises `NotFound` for an unknown model, and what `FactFile` raises; then no file is left.
    """
    if span.until_ms and span.since_ms >= span.until_ms:
        raise InvalidArgument("--since must be earlier than --until")
    for model in models:
        await must_be_known(log, model)
    progress = _Progress("export")
    with FactFile(path, overwrite=overwrite) as file:
        reports = [
            await _export_model(log, model, span, file.write, progress)
            for model in dict.fromkeys(models) or await known_models(log)
        ]
    whole = not any(report["unreadable"] for report in reports)
    facts = sum(report["facts"] for report in reports)
    return {"whole": whole, "file": str(path), "bytes": file.size_bytes, "facts": facts, "models": reports}


async def _export_model(
    log: AuditedLog,
    model: str,
    span: Span,
    write: Callable[[Sequence[Row]], None],
    progress: Callable[[str, int], None],
) -> dict[str, Any]:
    after = b"%d-%d" % (span.since_ms - 1, 2**64 - 1) if span.since_ms > 0 else START
    entries = facts = skipped = 0
    unreadable: list[str] = []
    first = last = ""
    while page := await log.range(keys.journal(model), after, _PAGE):
        after = page[-1].id
        if span.until_ms:
            page = [entry for entry in page if in_order(entry.id)[0] < span.until_ms]
        rows: list[Row] = []
        for entry in page:
            last = entry.id.decode()
            first = first or last
            try:
                found = list(rows_of(model, entry.id, entry.fields))
            except InvalidRecord:
                unreadable.append(last)
                continue
            skipped += not found
            rows += found
        write(rows)
        entries += len(page)
        facts += len(rows)
        progress(model, entries)
        if span.until_ms and in_order(after)[0] >= span.until_ms:
            break
    about = {"model": model, "entries": entries, "facts": facts, "first_entry": first, "last_entry": last}
    return {**about, "skipped": skipped, "unreadable": len(unreadable), "unreadable_entries": unreadable[:_MOST_NAMED]}


class _Progress:
    """Reports the progress of long work on stderr once a second."""

    def __init__(self, action: str) -> None:
        self._action = action
        self._next_s = time.monotonic() + _PROGRESS_S

    def __call__(self, model: str, entries: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _PROGRESS_S
            sys.stderr.write(f"charonia audit --{self._action}: {model}: {entries} entries\n")
            sys.stderr.flush()
