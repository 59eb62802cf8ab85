"""The columns and sentences that each command prints, from its document."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from charonia.operations.audit.journal_audit import Finding

from . import usage_tables
from .history_reports import exported, verified
from .rendering import age, detail, moment, one_line, pairs, size, table
from .route_reports import route_lines

_JOB_COLUMNS = (
    ("id", "id"),
    ("state", "state"),
    ("tenant", "tenant"),
    ("attempts", "attempts"),
    ("accepted", "accepted_us"),
    ("ended", "ended_us"),
    ("bytes", "bytes"),
    ("result", "result_bytes"),
)
_EXECUTOR_COLUMNS = (
    ("executor", "executor"),
    ("state", "state"),
    ("pool", "pool"),
    ("host", "host"),
    ("devices", "devices"),
    ("loaded", "loaded"),
    ("announced", "announced"),
    ("slots", "slots"),
    ("batches", "outstanding"),
    ("memory", "used_bytes"),
    ("budget", "budget_bytes"),
    ("most", "most_models"),
    ("heartbeat", "heartbeat_age_s"),
    ("labels", "labels"),
)
_TRACE_COLUMNS = (
    "receive", "request", "p99", "queue", "compute", "input", "infer", "output", "steps", "overhead", "send",
)  # fmt: skip
_JOB_NAMES = (
    "id",
    "state",
    "model_name",
    "tenant",
    "attempts",
    "accepted_us",
    "ended_us",
    "bytes",
    "result_bytes",
    "durability",
    "retention_s",
)


def text(options: argparse.Namespace, document: dict[str, Any]) -> str:
    """What a command prints without --json."""
    lines = _REPORTS[(options.command, getattr(options, "action", ""))](document)
    if getattr(options, "csv", False):
        lines = usage_tables.as_csv(document)
    return "".join(f"{line}\n" for line in lines)


def finding_json(finding: Finding) -> dict[str, str]:
    return {
        "rule": finding.rule.value,
        "model": finding.model,
        "request": finding.request,
        "entry": finding.entry,
        "detail": finding.detail,
    }


def _audit(document: dict[str, Any]) -> list[str]:
    if "intact" in document:
        return verified(document)
    if "file" in document:
        return exported(document)
    lines = []
    for finding in document["findings"]:
        where = f" in {finding['entry']}" if finding["entry"] else ""
        told = one_line(finding["detail"])
        lines.append(f"{finding['rule']}: request {finding['request'] or '?'} of '{finding['model']}'{where}: {told}")
    for model in document["models"]:
        lines += _audited(model)
    if not document["models"]:
        lines.append("the log knows no model")
    found = sum(sum(model["findings"].values()) for model in document["models"])
    if found > len(document["findings"]):
        lines.append(f"{found - len(document['findings'])} more findings were not printed")
    lines.append("clean" if document["clean"] else f"{found} findings")
    return lines


def _audited(model: dict[str, Any]) -> list[str]:
    ended = ", ".join(f"{count} {state}" for state, count in model["ended"].items()) or "none"
    begins = "complete" if model["complete"] else f"from {model['first_entry'] or 'now'}"
    lines = [
        f"{model['model']}: {model['entries']} entries ({begins}), {model['accepted']} accepted, ended: {ended}, "
        f"{model['unfinished']} unfinished"
    ]
    notes = [
        f"{model[name]} {words}"
        for name, words in (
            ("retried", "attempts beyond the first"),
            ("given_again", "attempts batched again that had not run"),
            ("earlier", "requests from before the journal's beginning"),
            ("late_starts", "starts noted after the end of an attempt already begun"),
            ("skipped", "entries of a kind unknown here"),
        )
        if model[name]
    ]
    lines += [f"  {note}" for note in notes]
    for request in model["oldest_unfinished"]:
        lines.append(f"  unfinished {request['id']} accepted {request['accepted'] or '?'} attempt {request['attempt']}")
    return lines


def _queue_ls(document: dict[str, Any]) -> list[str]:
    if not document["models"]:
        return ["the log knows no model"]
    rows = []
    for model in document["models"]:
        shared = {
            "model": model["model"],
            "paused": model["paused"],
            "owner": model["owner"] or "-",
            "tenants": {name: count["requests"] for name, count in model["tenants"].items()},
        }
        lanes = [row for row in document["queues"] if row["model"] == model["model"]]
        for lane in lanes or [{"requests": model["requests"], "bytes": model["bytes"]}]:
            where = f"{lane['level']}:{lane['lane']}" if "level" in lane else "-"
            requests = f"{lane['requests']}" if lane.get("exact", True) else f">={lane['requests']}"
            age_s = lane.get("oldest_age_s")
            values = {"queue": where, "requests": requests, "bytes": lane["bytes"], "oldest_age_s": age_s}
            rows.append({**shared, **values, "begun": lane.get("begun", 0)})
    columns = (
        ("model", "model"),
        ("level:lane", "queue"),
        ("requests", "requests"),
        ("begun", "begun"),
        ("bytes", "bytes"),
        ("oldest", "oldest_age_s"),
        ("paused", "paused"),
        ("owner", "owner"),
        ("tenants", "tenants"),
    )
    return table(rows, columns)


def _queue_inspect(document: dict[str, Any]) -> list[str]:
    head = f"{document['model']}: {document['requests']} requests, {size(document['bytes'])}"
    head += ", paused" if document["paused"] else ""
    lines = [head]
    for version, choice in document["adaptive"].items():
        lines.append(
            f"version {version}: batches from {choice['size']} rows on, after {choice['delay_us'] / 1000:.1f} ms at "
            f"the latest, at {choice['rows_per_s']:.0f} rows/s: the target of {choice['target_ms']:g} ms is "
            f"{choice['state']}"
        )
    if not document["queue"]:
        return lines
    columns = (
        ("id", "id"),
        ("job", "is_job"),
        ("age", "age_s"),
        ("tenant", "tenant"),
        ("level", "level"),
        ("lane", "lane"),
        ("rows", "rows"),
        ("bytes", "bytes"),
        ("deadline", "deadline_s"),
        ("attempt", "attempt"),
    )
    return [*lines, *table([{**row, "is_job": row["job"] is not None} for row in document["queue"]], columns)]


def _queue_pause(document: dict[str, Any]) -> list[str]:
    state = "paused" if document["paused"] else "running"
    already = " (it was already)" if document["paused"] == document["was_paused"] else ""
    owner = "" if document["owner"] else "; no batcher owns it now"
    return [f"{document['model']} is {state}{already}{owner}"]


def _queue_cancel(document: dict[str, Any]) -> list[str]:
    lines = [f"{len(document['cancelled'])} cancelled"]
    if document["ended_meanwhile"]:
        lines.append(f"{document['ended_meanwhile']} ended before they could be cancelled")
    return lines + [f"{text} is not in the queue" for text in document["missing"]]


def _queue_move(document: dict[str, Any]) -> list[str]:
    lines = [f"{request} moved to level {document['level']}" for request in document["moved"]]
    lines += [f"{request} stays: {reason}" for request, reason in document["left"].items()]
    return lines if document["applied"] else [*lines, "the owner does not answer: it counts from the next owner on"]


def _jobs_ls(document: dict[str, Any]) -> list[str]:
    if not document["jobs"]:
        return ["no jobs"]
    lines = table(document["jobs"], _JOB_COLUMNS)
    return [*lines, f"more: --after {document['next']}"] if document["next"] else lines


def _jobs_show(document: dict[str, Any]) -> list[str]:
    lines = pairs(document, _JOB_NAMES)
    if document["position"]:
        lines.append(f"position {document['position']} of {document['queue_length']}")
    return lines + [f"  {name}: {one_line(_flat(value))}" for name, value in document["about"].items()]


def _jobs_timeline(document: dict[str, Any]) -> list[str]:
    lines = [f"{document['id']} {document['state']}, accepted {moment(document['accepted_us'])}"]
    for event in document["events"]:
        told = detail({name: _flat(value) for name, value in event["detail"].items()})
        lines.append(f"{event['number']:>4}  +{age(event['after_s']):<8} {one_line(event['event'])}  {told}".rstrip())
    return lines


def _jobs_result(document: dict[str, Any]) -> list[str]:
    if document["error"] is not None:
        return [f"{document['id']} {document['state']}: {one_line(document['error'])}"]
    lines = [f"{document['id']} {document['state']}"]
    for response in document.get("responses", []):
        lines.append(f"response {response['index']}, attempt {response['attempt']}")
        lines += [f"  {line}" for line in _answered(response)]
    return lines + _answered(document)


def _answered(document: dict[str, Any]) -> list[str]:
    if document.get("error") is not None:
        return [one_line(document["error"])]
    lines = list(document.get("files", []))
    for output in document.get("outputs", []):
        lines.append(f"{one_line(output['name'])} {output['datatype']} {output['shape']}")
        lines.append(f"  {json.dumps(output['data'])}")
    return lines


def _jobs_cancel(document: dict[str, Any]) -> list[str]:
    lines = [f"{job} cancelled" for job in document["cancelled"]]
    lines += [f"{one_line(job['id'])} has {job['state']} already" for job in document["ended"]]
    lines += [f"{one_line(job)} is unknown to this log" for job in document["missing"]]
    return lines or ["no job matches"]


def _jobs_wait(document: dict[str, Any]) -> list[str]:
    told = f": {one_line(document['error'])}" if document["error"] else ""
    return [f"{document['id']} {document['state']}{told}"]


def _dlq_ls(document: dict[str, Any]) -> list[str]:
    if not document["letters"]:
        return ["no dead letters"]
    columns = (
        ("id", "id"),
        ("model", "model"),
        ("version", "version"),
        ("attempts", "attempts"),
        ("age", "age_s"),
        ("tenant", "tenant"),
        ("error", "error"),
    )
    lines = table(document["letters"], columns)
    return [*lines, "there are more: raise --limit"] if document["more"] else lines


def _dlq_show(document: dict[str, Any]) -> list[str]:
    names = ("id", "job", "model", "version", "content_hash", "tenant", "attempts", "time_us", "error")
    lines = pairs(document, names)
    for tensor in document["inputs"]:
        told = f"  input {one_line(tensor['name'])} {tensor['datatype']} {tensor['shape']}"
        if "data" in tensor:
            more = " ..." if tensor["elements"] > len(tensor["data"]) else ""
            told += f" {json.dumps(tensor['data'])}{more}"
        lines.append(told)
    if "inputs_missing" in document:
        lines.append(document["inputs_missing"])
    lines += [f"wrote {path}" for path in document.get("files", [])]
    if document["stderr"]:
        lines += ["stderr:", *(f"  {one_line(line)}" for line in document["stderr"])]
    return lines


def _dlq_replay(document: dict[str, Any]) -> list[str]:
    return [f"{letter['id']} goes again as job {letter['job']}" for letter in document["replayed"]] or ["nothing"]


def _dlq_drop(document: dict[str, Any]) -> list[str]:
    return [f"{letter} dropped" for letter in document["dropped"]] or ["nothing"]


def _flat(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def _executors_ls(document: dict[str, Any]) -> list[str]:
    rows = document["executors"]
    if not rows:
        return ["no executor has joined"]
    shown = [{**row, "labels": {k: v for k, v in row["labels"].items() if k not in ("host", "gpus")}} for row in rows]
    return table(shown, _EXECUTOR_COLUMNS)


def _state_show(document: dict[str, Any]) -> list[str]:
    names = ("directory", "log", "program", "path", "format", "since", "size_bytes", "keys", "used_by")
    lines = pairs(document, names)
    return lines + [
        f"lost at {each['time']}: {each['lost_bytes']} bytes, {each['kept']}" for each in document["repairs"]
    ]


def _state_export(document: dict[str, Any]) -> list[str]:
    lines = [document["repaired"]] if document["repaired"] else []
    what = f"{document['keys']} keys of {document['program']}, {size(document['bytes'])}"
    return [*lines, f"exported {what}, to {document['file']}"]


def _state_import(document: dict[str, Any]) -> list[str]:
    lines = [f"imported {document['keys']} keys into {document['into']} ({document['program']})"]
    if document["expired"]:
        lines.append(f"{document['expired']} keys were left out, their time is over")
    lines += [f"left out the file {one_line(name)}" for name in document["files_left_out"]]
    return [*lines, f"what was there before is in {document['replaced']}"] if document["replaced"] else lines


def _trace_summary(document: dict[str, Any]) -> list[str]:
    """Means in whole microseconds; what was made for a request stands below it."""
    names = [("request_p99_us", "p99") if name == "p99" else (f"{name}_us", name) for name in _TRACE_COLUMNS]
    used = [(key, name) for key, name in names if any(key in row for row in document["models"])]
    rows = [
        {"model": "  " * (len(row["path"]) - 1) + row["path"][-1], "count": row["count"]}
        | {"share": f"{row['share']:4.0%}" if "share" in row else None}
        | {name: round(row[key]) if key in row else None for key, name in used}
        for row in document["models"]
    ]
    columns = [(name, name) for name in ("model", "count", *(name for _, name in used), "share")]
    return [*table(rows, columns), f"{document['traces']} traces; means in microseconds"]


def _check(document: dict[str, Any]) -> list[str]:
    lines = [line for diff in document["diffs"] for line in diff.splitlines()]
    lines += [f"fixed: {text}" for text in document["fixed"]]
    lines += _fault_lines(document["faults"])
    lines += [f"note: {note['model'] and note['model'] + ': '}{note['text']}" for note in document["notes"]]
    found, models = len(document["faults"]), document["models"]
    bad = len({fault["model"] for fault in document["faults"]})
    counted = f"{models} model{'s' * (models != 1)}"
    lines.append(f"{counted}, {found} fault{'s' * (found != 1)} in {bad} of them" if found else f"{counted}, no fault")
    if found and document["fixed"]:
        lines.append("the faults above were not fixed: more than one thing could be meant")
    return lines


def _fault_lines(faults: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for fault in faults:
        place = f":{fault['line']}:{fault['column']}" if fault["line"] else ""
        field = f" {fault['field']}:" if fault["field"] else ""
        lines += [
            f"{fault['file']}{place}:{field} {one_line(fault['problem'])}",
            f"    expected: {one_line(fault['expected'])}",
            f"    write: {one_line(fault['instead'])}" + (" (--fix does)" if fault["fixable"] else ""),
        ]
    return lines


def _migrate(document: dict[str, Any]) -> list[str]:
    lines = []
    for model in document["models"]:
        lines.append(f"{model['model']}: from {one_line(model['from'])}, backend {model['backend']}")
        lines += [
            f"    {'wrote' if document['repository'] else 'would write'} {one_line(file)}" for file in model["files"]
        ]
        lines += [f"    fill in {one_line(step)}" for step in model["fill_in"]]
        lines += [f"    not taken over: {one_line(one['field'])}: {one_line(one['why'])}" for one in model["unmapped"]]
    lines += [f"not migrated: {one_line(one['file'])}: {one_line(one['problem'])}" for one in document["refused"]]
    lines += _fault_lines(document["faults"])
    if not document["models"]:
        lines.append("nothing was written")
    elif not document["repository"]:
        lines.append("nothing was written: --to=REPOSITORY writes it")
    return lines


_REPORTS: dict[tuple[str, str], Callable[[dict[str, Any]], list[str]]] = {
    ("audit", ""): _audit,
    ("usage", ""): usage_tables.as_table,
    ("check", ""): _check,
    ("migrate", ""): _migrate,
    ("queue", "ls"): _queue_ls,
    ("queue", "inspect"): _queue_inspect,
    ("queue", "pause"): _queue_pause,
    ("queue", "resume"): _queue_pause,
    ("queue", "cancel"): _queue_cancel,
    ("queue", "move"): _queue_move,
    ("jobs", "ls"): _jobs_ls,
    ("jobs", "show"): _jobs_show,
    ("jobs", "timeline"): _jobs_timeline,
    ("jobs", "result"): _jobs_result,
    ("jobs", "cancel"): _jobs_cancel,
    ("jobs", "wait"): _jobs_wait,
    ("dlq", "ls"): _dlq_ls,
    ("dlq", "show"): _dlq_show,
    ("dlq", "replay"): _dlq_replay,
    ("dlq", "drop"): _dlq_drop,
    ("route", ""): route_lines,
    ("executors", "ls"): _executors_ls,
    ("state", "show"): _state_show,
    ("state", "export"): _state_export,
    ("state", "import"): _state_import,
    ("trace", "summary"): _trace_summary,
}
