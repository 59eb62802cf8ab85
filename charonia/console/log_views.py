"""Reads what pages show from the log, with the readers of `charonia.operations`: documents of plain values. The page of
one request is read by `stories.request_reading`.

Nothing is written: what changes something is `actions`'. What a viewer with a tenant may see is decided here: its own
jobs, queued requests, streams and dead letters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

from charonia import keys
from charonia.catalog.catalog import EXPLICIT, LOADING, Catalog, ExecutorView
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import InvalidRecord, NotFound
from charonia.eventlog.control import folded_control
from charonia.eventlog.port import EventLog, Statistics
from charonia.facts.jobs import JobState
from charonia.facts.stream_notes import StreamsNote
from charonia.models.config_forms import to_json
from charonia.operations import dead_letters, executors, queues
from charonia.operations import job_commands as jobs
from charonia.releases.route_change import summary
from charonia.releases.route_rule import CANARY, RouteRule, standing_in, without_values

from .cursors import Cursors
from .viewers import Viewer

_SCANNED = 200
"""Requests of a lane that a model's page reads: their age is that of the first, totals are the log's counts."""
_QUEUED_ROWS = 50
_JOB_ROWS = 100
_JOBS_READ = 5_000
"""Records that one page of jobs reads at most: few of many may be in the state that is asked for."""
_LETTER_ROWS = 100
_LETTERS_READ = 1_000
"""Letters that one page reads at most: they have their requests' inputs with them."""
_STREAM_ROWS = 200
_GATEWAY = "gateway"

ReadStatistics = Callable[[str, int, Mapping[str, int], Mapping[str, int]], dict[str, Any]]
"""Makes Triton's statistics of a version (name, version, counters, memory): the gateways' own."""


async def overview(log: EventLog) -> dict[str, Any]:
    """Executors with the versions they hold, models with their queues, and how the log is. The same for all viewers."""
    before_ns = monotonic_ns()
    used, most = await log.memory_bytes()
    answer_ms = (monotonic_ns() - before_ns) / 1e6
    catalog = await folded_control(log)
    listed = await executors.list_executors(log, outstanding=False)
    queued = await queues.list_queues(log, (), wall_ns(), 1, tenants=False)  # the first request has the age
    for row in listed["executors"]:
        row["holds"] = _held(catalog.executors.get(row["executor"]))
    return {
        "executors": listed["executors"],
        "models": _models(catalog, queued),
        "queues": queued["queues"],
        "log": {"used_bytes": used, "most_bytes": most, "answer_ms": answer_ms},
        "lag_s": max((row["oldest_age_s"] for row in queued["queues"]), default=0.0),
        "queued": sum(row["requests"] for row in queued["models"]),
    }


def _held(view: ExecutorView | None) -> list[dict[str, Any]]:
    if view is None:
        return []
    return [
        {
            "model": model,
            "version": version,
            "state": "on demand" if entry.on_demand else entry.state,
            "slots": entry.loaded.slots if entry.loaded is not None else 0,
        }
        for model, version, entry in sorted(view.versions, key=lambda one: one[:2])
    ]


def _models(catalog: Catalog, queued: Mapping[str, Any]) -> list[dict[str, Any]]:
    states: dict[str, list[dict[str, Any]]] = {}
    for row in catalog.index():
        of_row = {"version": row.version, "state": row.state, "reason": row.reason}
        states.setdefault(row.model, []).append({**of_row, "max_batch": _max_batch(catalog, row.model, row.version)})
    found: dict[str, dict[str, Any]] = {
        name: {"model": name, "versions": versions, "requests": 0, "bytes": 0, "paused": False}
        for name, versions in states.items()
    }
    oldest_s: dict[str, float] = {}
    for lane in queued["queues"]:
        oldest_s[lane["model"]] = max(oldest_s.get(lane["model"], 0.0), lane["oldest_age_s"])
    for total in queued["models"]:
        listed = found.setdefault(total["model"], {"model": total["model"], "versions": []})
        listed.update(total)
        listed["oldest_age_s"] = oldest_s.get(total["model"])
    return [found[name] for name in sorted(found)]


def _max_batch(catalog: Catalog, model: str, version: int) -> int:
    """Its `max_batch_size`: rows; 0 for a version that is not loaded, or does not batch."""
    served = catalog.held(model).get(version)
    return served.config.max_batch_size if served is not None else 0


# -- a model -----------------------------------------------------------------------------------------------------------


async def model_page(log: EventLog, model: str, viewer: Viewer, statistics: ReadStatistics) -> dict[str, Any]:
    """Versions, configuration, statistics, and the queue by level and tenant. Raises `NotFound`."""
    catalog = await folded_control(log)
    rows = [row for row in catalog.index() if row.model == model]
    now_ns = wall_ns()
    listed = await queues.list_queues(log, (model,), now_ns, _SCANNED)
    inspected = await queues.inspect_queue(log, model, now_ns, _QUEUED_ROWS)
    (total,) = listed["models"]
    # the record of a call names its tenant, but those of releases before ADR 0055 do not: without one it is of no one
    own = [row for row in inspected["queue"] if (row["job"] or row["tenant"]) and viewer.may_see(row["tenant"])]
    visible = own if viewer.scoped else inspected["queue"]
    tenants = {name: counts for name, counts in total["tenants"].items() if viewer.may_see(name)}
    return {
        "model": model,
        "versions": [
            {
                "version": row.version,
                "state": row.state,
                "reason": row.reason,
                "max_batch": _max_batch(catalog, model, row.version),
                **_served(catalog, model, row.version),
            }
            for row in rows
        ],
        "route": _route(catalog, model, viewer),
        "config": _config(catalog, model),
        "levels": _levels(catalog, model),
        "explicit": EXPLICIT in catalog.control_modes(),
        "can_be_unloaded": bool(catalog.held(model)) or any(row.state == LOADING for row in rows),
        "statistics": await _statistics(log, catalog, model, statistics),
        "queue": {**total, "tenants": tenants},
        "lanes": listed["queues"],
        "queued": visible,
        "scanned": _SCANNED,
        "opens_calls": not viewer.scoped,
        "adaptive": inspected["adaptive"],
        "excluded": {name: view.excluded[model] for name, view in catalog.executors.items() if model in view.excluded},
    }


def _served(catalog: Catalog, model: str, version: int) -> dict[str, Any]:
    slots, places, load_s, memory = 0, [], 0.0, dict[str, int]()
    for incarnation, view in catalog.executors.items():
        entry = view.versions.get(model, version)
        if entry is None or entry.loaded is None or view.lost:
            continue
        slots += entry.loaded.slots
        places.append(incarnation)
        load_s = max(load_s, entry.loaded.load_ns / 1e9)
        for place, size in entry.loaded.memory.items():
            memory[place] = memory.get(place, 0) + size
    return {"slots": slots, "executors": places, "load_s": load_s, "memory": memory}


def _config(catalog: Catalog, model: str) -> dict[str, Any]:
    """The configuration of its newest version, as executors completed it; empty if none is loaded."""
    served = catalog.held(model)
    return to_json(served[max(served)].config) if served else {}


def _route(catalog: Catalog, model: str, viewer: Viewer) -> dict[str, Any] | None:
    """Its routing rule in words, and the decisions about it, the latest first; None without a rule.

    Which values of headers choose the candidate is for those who may change the rule. A tenant learns of no other.
    """
    rule = catalog.routes.rules.get(model)
    if rule is None:
        return None
    shown = rule if viewer.operates else without_values(rule)
    if viewer.scoped:
        shown = replace(without_values(rule), tenants=tuple(filter(viewer.may_see, rule.tenants)))
    return {
        "stage": rule.stage,
        "summary": summary(shown),
        "missing": _missing(rule, catalog.served(model)),
        "decisions": [] if viewer.scoped else [asdict(decision) for decision in reversed(rule.history)],
    }


def _missing(rule: RouteRule, served: Collection[int]) -> list[str]:
    """What becomes of requests for versions of a rule that are not served."""
    said = []
    if rule.present not in served and served:
        said.append(f"version {rule.present} is not served: version {standing_in(rule, served)} gets its requests")
    if rule.stage == CANARY and rule.candidate not in served:
        said.append(f"version {rule.candidate} is not served: the present version gets its requests until it is")
    if rule.shadow and rule.shadow not in served:
        said.append(f"version {rule.shadow} is not served: it gets no copies until it is")
    return said


def _levels(catalog: Catalog, model: str) -> int:
    """The priority levels of its newest version, 0 for none."""
    served = catalog.held(model)
    batching = served[max(served)].interface.dynamic_batching if served else None
    return batching.priority_levels if batching is not None else 0


async def _statistics(log: Statistics, catalog: Catalog, model: str, read: ReadStatistics) -> list[dict[str, Any]]:
    found = []
    for version, served in sorted(catalog.held(model).items()):
        counters = await log.statistics(keys.statistics(model, version, served.content_hash))
        found.append(read(model, version, counters, _served(catalog, model, version)["memory"]))
    return found


# -- jobs --------------------------------------------------------------------------------------------------------------


async def job_list(
    log: EventLog, viewer: Viewer, model: str, state: str, after: str, cursors: Cursors[jobs.Place]
) -> dict[str, Any]:
    """Jobs, active ones first, of a model ("" for all) and in a state ("" for any). `after` is the `next` of another
    list, for a scoped viewer a word of `cursors`: the job where a list ends may be another's. Raises `NotFound`."""
    wanted = jobs.Filter(
        (model,) if model else (),
        frozenset({JobState(state)}) if state in set(JobState) else frozenset(),
        viewer.tenant if viewer.scoped else None,
        0.0,
        cursors.place(viewer.tenant, after) if viewer.scoped and after else after,
    )
    now_us = wall_ns() // 1000
    found, last = await jobs.read_jobs(log, wanted, now_us, _JOB_ROWS, _JOBS_READ)
    further = last.public_id if last is not None else None
    if last is not None and viewer.scoped:
        further = cursors.word(viewer.tenant, jobs.place_of(last))
    return {"jobs": [jobs.job_json(job, now_us) for job in found], "next": further}


# -- dead letters ------------------------------------------------------------------------------------------------------


async def letter_list(
    log: EventLog, viewer: Viewer, model: str, after: str, cursors: Cursors[dead_letters.LetterPlace]
) -> dict[str, Any]:
    """Dead letters of a model, or of all (""), after the `next` of another list. Raises `NotFound`."""
    rows, last = await dead_letters.read_letters(
        log, (model,) if model else (), wall_ns() // 1000, _LETTER_ROWS, viewer.tenant if viewer.scoped else None,
        after=cursors.place(viewer.tenant, after) if after else None, scan=_LETTERS_READ,
    )  # fmt: skip
    return {"letters": rows, "next": cursors.word(viewer.tenant, last) if last is not None else None}


async def letter_page(log: EventLog, viewer: Viewer, model: str, text: str) -> dict[str, Any]:
    """One dead letter with a preview of its inputs. Raises `NotFound`."""
    (letter,) = await dead_letters.choose(log, model, (text,), every=False, scan=_LETTERS_READ)
    shown = await dead_letters.show_letter(log, letter, wall_ns() // 1000, None)
    if not viewer.may_see(shown["tenant"]):
        raise NotFound(f"dead letter '{text}' is unknown to model '{model}'")
    if viewer.scoped:  # the instance had requests of others too, and may have written about them
        shown["stderr"] = []
    return shown


# -- streams -----------------------------------------------------------------------------------------------------------


async def stream_list(log: EventLog, viewer: Viewer) -> dict[str, Any]:
    """The open streams of all gateways as those have published them, oldest first; a tenant's own alone.

    `open` is how many there are altogether, None for a viewer who may not know; `cut` says that a gateway has more
    than it publishes.
    """
    catalog = await folded_control(log)
    gateways = sorted(one.incarnation for one in catalog.processes.values() if one.role == _GATEWAY)
    found = await log.notes([keys.open_streams(gateway) for gateway in gateways]) if gateways else []
    rows: list[dict[str, Any]] = []
    total, cut, now_us = 0, False, wall_ns() // 1000
    for gateway, data in zip(gateways, found, strict=True):
        if data is None:
            continue
        note = _note(data)
        total, cut = total + note.open, cut or note.open > len(note.rows)
        rows += [
            {**asdict(row), "gateway": gateway, "age_s": (now_us - row.since_us) / 1e6,
             "silent_s": (now_us - row.last_us) / 1e6 if row.last_us else None}
            for row in note.rows if viewer.may_see(row.tenant)
        ]  # fmt: skip
    rows.sort(key=lambda row: row["since_us"])
    return {
        "streams": rows[:_STREAM_ROWS],
        "open": None if viewer.scoped else total,
        "cut": cut or len(rows) > _STREAM_ROWS,
        "gateways": len(gateways),
    }


def _note(data: bytes) -> StreamsNote:
    """An unreadable note is that of a newer release: as if there were none."""
    try:
        return StreamsNote.unpack(data)
    except InvalidRecord:
        return StreamsNote(0, 0)
