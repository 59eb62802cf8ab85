"""Measures what many queued jobs cost on this machine: `python -m charonia.operations.capacity --jobs 1000000`.

Fills a private log with jobs of the `identity` example model ([1,16] FP32, as the bench), measures memory, listings and
the cold restart of the log server, then starts `charonia serve` on it until the first jobs have been executed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from charonia.clock import wall_ns
from charonia.errors import StartupError
from charonia.eventlog.embedded import PrivateServer
from charonia.eventlog.port import EventLog, Jobs, Limits
from charonia.eventlog.redis import RedisLog
from charonia.facts.jobs import NewJob, public_id
from charonia.tensors import Tensor
from charonia.wire import FLAG_JOB, FLAG_JOURNALLED, batch_signature, pack_request, record_fields, request_meta

from . import job_commands as jobs
from . import queues
from .audit.model_audit import Scope, audit_models

MODEL = "identity"
_IN_FLIGHT = 200
_PAGE = 100
_PATIENCE_S = 900.0
_FLAGS = FLAG_JOB | FLAG_JOURNALLED


def main() -> int:
    """The console script; prints one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m charonia.operations.capacity", allow_abbrev=False)
    parser.add_argument("--jobs", type=int, default=1_000_000, metavar="N", help="jobs to queue (1000000)")
    parser.add_argument(
        "--model-repository",
        default="examples/models",
        metavar="DIR",
        help="has the model 'identity' (examples/models)",
    )
    parser.add_argument("--drain", type=int, default=1000, metavar="N", help="jobs to see executed at the end (1000)")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="charonia-capacity-"))
    try:
        report = asyncio.run(_measure(options, directory))
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 1 if "serve_failed" in report else 0


async def _measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    models = directory / "models"
    shutil.copytree(Path(options.model_repository) / MODEL, models / MODEL)
    state = directory / "state"
    report: dict[str, Any] = {"jobs": options.jobs}
    server = PrivateServer(state)
    server.start()
    try:
        server.wait_ready()
        before = _used_bytes(server.url)
        log = RedisLog(server.url)
        await log.open()
        report["fill_s"], ids = await _timed(lambda: _fill(log, options.jobs))
        report["bytes_per_job"] = round((_used_bytes(server.url) - before) / options.jobs)
        report |= await _listings(log, ids)
        await log.close()
        server.stop(_PATIENCE_S)
        report["log_bytes_on_disk"] = sum(f.stat().st_size for f in state.rglob("*") if f.is_file())
        started = time.monotonic()
        server.start()
        server.wait_ready(_PATIENCE_S)
        report["log_restart_s"] = round(time.monotonic() - started, 2)
    finally:
        server.stop(_PATIENCE_S)
    try:
        report |= await _serve(models, state, options.jobs - 1, options.drain)
    except StartupError as error:  # keep what was measured before
        report["serve_failed"] = str(error)
    return report


async def _fill(log: Jobs, count: int) -> list[bytes]:
    """Queue jobs, several calls at a time; returns their ids in the order of acceptance."""
    tensor = Tensor.of("INPUT0", np.arange(16, dtype=np.float32).reshape(1, 16))
    meta = request_meta(1, "", [tensor], (), {})
    signature = batch_signature(1, [("INPUT0", (16,))])
    ids = [secrets.token_bytes(16) for _ in range(count)]

    async def submit(job_id: bytes) -> None:
        record = pack_request(
            job_id,
            b"",
            b"",
            meta,
            [tensor.data],
            rows=1,
            signature=signature,
            level=0,
            accepted_ns=wall_ns(),
            flags=_FLAGS,
        )
        job = NewJob(job_id, len(record), wall_ns() // 1000, 86_400, about={"version": 1})
        await log.accept_job(MODEL, 0, 0, job, record_fields([record]), Limits())

    for at in range(0, count, _IN_FLIGHT):
        await asyncio.gather(*[submit(job_id) for job_id in ids[at : at + _IN_FLIGHT]])
    return ids


async def _listings(log: EventLog, ids: list[bytes]) -> dict[str, Any]:
    """Milliseconds of operators' and callers' queries; the audit reads the whole log."""

    async def page(after: str) -> dict[str, Any]:
        return await jobs.list_jobs(log, jobs.Filter((MODEL,), after=after), wall_ns() // 1000, _PAGE)

    report: dict[str, Any] = {}
    after = ""
    for number in range(1, 11):
        spent_s, found = await _timed(partial(page, after))
        after = found["next"]
        if number in (1, 10):
            report[f"jobs_ls_page_{number}_ms"] = _ms(spent_s)
    middle = ids[len(ids) // 2]
    spent_s, found = await _timed(lambda: page(public_id(MODEL, middle)))
    report["jobs_ls_page_in_the_middle_ms"] = _ms(spent_s)
    for name, job_id in (("first", ids[0]), ("last", ids[-1])):
        spent_s, _ = await _timed(partial(log.job_position, MODEL, job_id))
        report[f"job_position_{name}_ms"] = _ms(spent_s)
    spent_s, _ = await _timed(lambda: jobs.show_job(log, public_id(MODEL, middle), wall_ns() // 1000))
    report["jobs_show_ms"] = _ms(spent_s)
    spent_s, _ = await _timed(lambda: queues.inspect_queue(log, MODEL, wall_ns(), 50))
    report["queue_inspect_ms"] = _ms(spent_s)
    spent_s, _ = await _timed(lambda: queues.list_queues(log, [MODEL], wall_ns()))
    report["queue_ls_s"] = round(spent_s, 2)
    spent_s, audit = await _timed(lambda: audit_models(log, [MODEL], Scope(), lambda _finding: None, 0))
    report |= {"audit_s": round(spent_s, 2), "audit_clean": audit["clean"]}
    spent_s, cancelled = await _timed(
        lambda: jobs.cancel_jobs(log, [public_id(MODEL, ids[-1])], None, wall_ns() // 1000)
    )
    if not cancelled["cancelled"]:
        raise StartupError("the last job could not be cancelled")
    report["jobs_cancel_last_ms"] = _ms(spent_s)
    return report


async def _serve(models: Path, state: Path, queued: int, drain: int) -> dict[str, Any]:
    """Start everything on the filled log: seconds until ready, until the first and until `drain` jobs have ended."""
    command = [
        sys.executable,
        "-m",
        "charonia.cli",
        "serve",
        "--model-repository",
        str(models),
        "--state-dir",
        str(state),
    ]
    command += ["--http-port=0", "--grpc-port=0", "--metrics-port=0", "--http-address=127.0.0.1"]
    started = time.monotonic()
    report: dict[str, Any] = {}
    process = await asyncio.to_thread(_start, command, state / "capacity-serve.log")
    try:
        url = await _until(lambda: _log_url(state), process, state)
        log = RedisLog(str(url))
        await _until(lambda: _is_ready(state), process, state)
        report["serve_ready_s"] = round(time.monotonic() - started, 2)
        await log.open()

        async def left() -> int:
            requests, _ = await log.pending(MODEL)
            return requests

        async def ended(most_left: int) -> bool:
            return await left() <= most_left

        await _until(lambda: ended(queued - 1), process, state)
        report["first_job_s"] = round(time.monotonic() - started, 2)
        begun, before = time.monotonic(), await left()
        await _until(lambda: ended(max(0, before - drain)), process, state)
        report["jobs_per_s"] = round((before - await left()) / (time.monotonic() - begun))
        await log.close()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            report["stop_exit_code"] = await asyncio.to_thread(process.wait, 60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return report


def _start(command: list[str], out: Path) -> subprocess.Popen[bytes]:
    with out.open("wb") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)


async def _until(condition: Callable[[], Awaitable[Any]], process: subprocess.Popen[bytes], state: Path) -> Any:
    give_up = time.monotonic() + _PATIENCE_S
    while time.monotonic() < give_up:
        if process.poll() is not None:
            break
        if found := await condition():
            return found
        await asyncio.sleep(0.01)
    words = (state / "capacity-serve.log").read_text(errors="replace")[-2000:]
    raise StartupError(f"charonia serve did not get there:\n{words}")


async def _log_url(state: Path) -> str:
    try:
        return str(json.loads((state / "endpoints.json").read_text())["log"])
    except (OSError, ValueError, KeyError):
        return ""


async def _is_ready(state: Path) -> bool:
    host, _, port = json.loads((state / "endpoints.json").read_text())["http"].rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    try:
        writer.write(b"GET /v2/health/ready HTTP/1.1\r\nHost: capacity\r\nConnection: close\r\n\r\n")
        return b" 200 " in await reader.readline()
    finally:
        writer.close()


async def _timed(work: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    began = time.monotonic()
    found = await work()
    return round(time.monotonic() - began, 4), found


def _ms(spent_s: float) -> float:
    return round(spent_s * 1000, 1)


def _used_bytes(url: str) -> int:
    """The memory that the server's allocator has in use."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(unquote(urlsplit(url).path))
        client.sendall(b"INFO memory\r\n")
        answer = b""
        while not (found := re.search(rb"used_memory:(\d+)\r\n", answer)):
            answer += client.recv(65536)
    return int(found[1])


if __name__ == "__main__":
    sys.exit(main())
