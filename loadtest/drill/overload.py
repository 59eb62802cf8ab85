"""`python -m loadtest.drill.overload`: no process that lives is taken for lost on a machine with too much to do.

Starts `charonia serve` with several parts, processes that only compute, `--factor` for each core, and clients, of which
one sends JSON bodies that hold up a gateway's event loop. For `--minutes` it reads the leases and notes the longest
silence of each role. Then, still under load, it kills parts with SIGKILL and measures how long it takes until others
know: alone, as a process ends, and together with the process that prolongs its leases, as a machine ends.

Exit 0 when no process was lost before the kills and each kill was known in time.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadtest.bench.servers import Charonia
from loadtest.model import LoadTestError

from .clients import request_body
from .log_client import LogClient, connected

_LOST = re.compile(r"(\S+)(?: \(pid \d+\))? is (?:lost|taken for lost): .*")
_KILLED_ROLES = ("gateway", "executor", "batcher")
_LOOK_S = 0.01
_CALM_S = 5.0
"""Between two kills; the part is there again before."""
_KNOWN_WITHIN_S = 20.0
_CLIENTS = 4
_LARGE_EVERY_S = 10.0
_ANSWERED_WITHIN_S = 120.0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.drill.overload", description="Losses that are none, and how soon real ones are known."
    )
    parser.add_argument("--model-repository", type=Path, default=Path("examples/models"))
    parser.add_argument("--model", default="identity", help="a model with INPUT0 FP32 [-1,16] that gives it back")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to watch (default 60)")
    parser.add_argument("--factor", type=int, default=4, help="processes that only compute, for each core (default 4)")
    parser.add_argument(
        "--large-numbers",
        type=int,
        default=1_000_000,
        metavar="N",
        help="numbers in the JSON bodies that hold up a gateway; 0: none (default 1000000)",
    )
    parser.add_argument("--kills", type=int, default=10, help="of each kind, at the end (default 10)")
    parser.add_argument("--process-secs", type=float, default=0.3, help="the end of a process is known (default 0.3)")
    parser.add_argument("--machine-secs", type=float, default=3.0, help="the end of a machine is known (default 3)")
    parser.add_argument("--json", action="store_true", help="report as one JSON document")
    return parser


class Askers:
    """Clients in closed loops, in a process of their own, until `stop`; it returns what became of their requests."""

    def __init__(self, address: str, model: str, large_numbers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_ask_until_told, args=(theirs, address, model, large_numbers))

    def __enter__(self) -> Askers:
        self._process.start()
        return self

    def stop(self) -> dict[str, int]:
        self._ours.send(None)
        return dict(sorted(self._ours.recv().items()))

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.join()


def _ask_until_told(told: Any, address: str, model: str, large_numbers: int) -> None:
    counts: Counter[str] = Counter()
    small = json.dumps(request_body([0.5] * 16)).encode()
    threads = [
        threading.Thread(target=_ask, args=(counts, address, model, small, "small", 0.0), daemon=True)
        for _ in range(_CLIENTS)
    ]
    if rows := large_numbers // 16:
        body = request_body([0.25] * 16 * rows)
        body["inputs"][0]["shape"] = [rows, 16]
        large = json.dumps(body).encode()
        threads.append(
            threading.Thread(target=_ask, args=(counts, address, model, large, "large", _LARGE_EVERY_S), daemon=True)
        )
    for thread in threads:
        thread.start()
    told.recv()
    told.send(counts)


def _ask(counts: Counter[str], address: str, model: str, body: bytes, kind: str, pause_s: float) -> None:
    connection = http.client.HTTPConnection(address, timeout=_ANSWERED_WITHIN_S)
    while True:
        time.sleep(pause_s)
        try:
            connection.request("POST", f"/v2/models/{model}/infer", body)
            answer = connection.getresponse()
            answer.read()
            counts[f"{kind}: {answer.status}"] += 1
        except (OSError, http.client.HTTPException) as error:
            counts[f"{kind}: {type(error).__name__}"] += 1
            connection.close()
            time.sleep(_LOOK_S)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that only compute."""
    running = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextmanager
def first() -> Iterator[None]:
    """Where this may be done, be scheduled before others: what is measured is their time, not this process's."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, min(before, -10))
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


class Watch:
    """Reads leases, and what the server's log file says about losses."""

    def __init__(self, log: LogClient, log_file: Path) -> None:
        self._log, self._log_file = log, log_file
        self.silences_ms: dict[str, int] = defaultdict(int)
        self.reads = 0

    def read(self) -> None:
        """Note for each role how long ago the last heartbeat was, if that is longer than ever before."""
        for name in self._log.keys("alive:*"):
            ttl_ms, left_ms = self._log.ask("GET", name), self._log.ask("PTTL", name)
            if ttl_ms is not None and left_ms >= 0:
                role = name.split(":")[1]
                self.silences_ms[role] = max(self.silences_ms[role], int(ttl_ms) - left_ms)
        self.reads += 1

    def losses(self) -> list[str]:
        """The lines of the server's log that say so."""
        return [line for line in self._text().splitlines() if _LOST.search(line)]

    def is_leased(self, pid: int) -> bool:
        return any(f"-{pid}-" in name for name in self._log.keys("alive:*"))

    def is_up(self, pid: int) -> bool:
        """Whether a part says that it is up. Before that others need not know it, and so nothing of its end."""
        return re.search(rf" {pid} \S+\] \S+ is up", self._text()) is not None

    def _text(self) -> str:
        return self._log_file.read_text(errors="replace")


class Kills:
    """Kills parts of a server; each returns after how many seconds that is known."""

    def __init__(self, processes_file: Path, watch: Watch) -> None:
        self._processes_file, self._watch = processes_file, watch

    def kill_process(self, role: str) -> float:
        pid, _ = self._victim(role)
        os.kill(pid, signal.SIGKILL)
        return self._known_after(lambda: not self._watch.is_leased(pid))

    def kill_machine(self, role: str) -> float:
        """The part and its keeper fall silent with their connections open: only the end of the lease tells."""
        silent = (pid, _) = self._victim(role)
        for one in reversed(silent):
            os.kill(one, signal.SIGSTOP)
        try:
            return self._known_after(lambda: any(f"-{pid}-" in line for line in self._watch.losses()))
        finally:
            for one in silent:
                os.kill(one, signal.SIGKILL)

    def _victim(self, role: str) -> tuple[int, int]:
        """The pids of a part that is up, and of its keeper."""
        give_up_s = time.monotonic() + 120
        while time.monotonic() < give_up_s:
            processes = json.loads(self._processes_file.read_bytes())
            keepers = {p["parent"]: p["pid"] for p in processes if p["role"] == "beats"}
            for process in processes:
                pid = process["pid"]
                if process["role"] == role and pid in keepers and self._watch.is_leased(pid) and self._watch.is_up(pid):
                    return pid, keepers[pid]
            time.sleep(0.1)
        raise LoadTestError(f"there is no {role} to kill")

    @staticmethod
    def _known_after(is_known: Callable[[], bool]) -> float:
        began_s = time.monotonic()
        while not is_known():
            if time.monotonic() - began_s > _KNOWN_WITHIN_S:
                break
            time.sleep(_LOOK_S)
        took_s = time.monotonic() - began_s
        time.sleep(_CALM_S)
        return took_s


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole drill; the report."""
    cores = os.cpu_count() or 1
    flags = ["--executors=2", "--gateways=2", "--model-control-mode=explicit", f"--load-model={options.model}"]
    with Charonia(options.model_repository, [*flags, "--http-address=127.0.0.1"]) as server:
        where = server.endpoints
        if where.processes_file is None or where.log_url is None:
            raise LoadTestError("the server does not say where its log is")
        log_file = where.processes_file.with_name("bench-serve.log")
        with connected(where.log_url) as log:
            watch = Watch(log, log_file)
            with (
                busy(options.factor * cores),
                Askers(str(where.http), options.model, options.large_numbers) as askers,
                first(),
            ):
                end_s = time.monotonic() + options.minutes * 60
                while time.monotonic() < end_s:
                    watch.read()
                    time.sleep(_LOOK_S)
                load_average = os.getloadavg()[0]
                losses = watch.losses()
                requests = askers.stop()
                kills = Kills(where.processes_file, watch)
                roles = [_KILLED_ROLES[number % len(_KILLED_ROLES)] for number in range(options.kills)]
                process_s = [kills.kill_process(role) for role in roles]
                machine_s = [kills.kill_machine(role) for role in roles]
    return {
        "cores": cores,
        "busy_processes": options.factor * cores,
        "minutes": options.minutes,
        "load_average": round(load_average, 1),
        "requests": requests,
        "reads_of_leases": watch.reads,
        "longest_silence_ms": dict(watch.silences_ms),
        "losses": losses,
        "process_known_s": [round(took_s, 3) for took_s in process_s],
        "machine_known_s": [round(took_s, 3) for took_s in machine_s],
        "problems": [
            *(f"lost, and it lives: {line}" for line in losses),
            *_late("a process", process_s, options.process_secs),
            *_late("a machine", machine_s, options.machine_secs),
        ],
    }


def _late(what: str, took_s: list[float], limit_s: float) -> list[str]:
    late = [one for one in took_s if one > limit_s]
    return [f"the end of {what} was known after {max(late):.2f} s, {len(late)} times after {limit_s} s"] if late else []


def _told(report: dict[str, Any]) -> str:
    lines = [
        f"{report['busy_processes']} busy processes on {report['cores']} cores for {report['minutes']:g} minutes, "
        f"load average {report['load_average']}",
        f"requests: {report['requests']}",
        f"longest silences, ms, in {report['reads_of_leases']} readings: {report['longest_silence_ms']}",
        f"lost: {len(report['losses'])}",
    ]
    for what in ("process", "machine"):
        if took_s := report[f"{what}_known_s"]:
            times = f"median {statistics.median(took_s):.3f} s, longest {max(took_s):.3f} s of {len(took_s)}"
            lines.append(f"the end of a {what} was known after: {times}")
    return "\n".join([*lines, *(f"PROBLEM {text}" for text in report["problems"])])


def main() -> int:
    options = parser().parse_args()
    try:
        report = run(options)
    except LoadTestError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(report, indent=1) if options.json else _told(report), flush=True)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
