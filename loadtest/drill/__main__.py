"""The command: starts a stack (or uses one that runs), loads it, carries out the kills, then checks what is left.

What is checked: every answer was the right one; every accepted job has one end, the one its caller was told; the same
key gave the same job; every webhook came; the queue is empty; `charonia audit` is clean. Under a load of waves also: no
caller waited too long; nothing of a wave is left in the log, and no lease of a gateway that is gone; statistics count
what is answered; no payload directory stays. Exit 0 when all of it holds.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadtest.model import LoadTestError

from .clients import Client, Disconnected, LoadClient, Told
from .hooks import Receiver
from .matrix import LOADS, ROLES, STEPS, WAVE_STEPS, Cell, Kill, Matrix, cells
from .waves import WaveClient, are_riding, check_statistics, left_behind, left_in

SETTLE_WITHIN_S = 30.0
READY_WITHIN_S = 60.0
EVERY_STEP = sorted({*STEPS, *WAVE_STEPS})


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.drill",
        description="Kill -9 every part of a Charonia server at every step of a request's life, under load, and check "
        "that nothing is lost, doubled or wrong.",
    )
    parser.add_argument("--model-repository", type=Path, help="serve this one (default examples/models)")
    parser.add_argument(
        "--state-dir",
        type=Path,
        help="drill the charonia serve that runs here, started with "
        "--fail-points STATE_DIR/fail-points --journal all; without it the drill starts its own",
    )
    parser.add_argument("--model", default="identity", help="a model with INPUT0 FP32 [-1,16] that gives it back")
    parser.add_argument("--clients", type=int, default=32, metavar="N")
    parser.add_argument(
        "--loads",
        default=",".join(LOADS),
        help="what to ask: mixed (jobs, keyed and keyless requests, journalled), waves, colocated (waves, with the "
        "batcher inside the executor); each has a server of its own; with --state-dir only mixed (default: all)",
    )
    parser.add_argument("--roles", default=",".join(ROLES), help="parts to kill (default: all)")
    parser.add_argument("--steps", default=",".join(EVERY_STEP), help="steps to kill at (default: all)")
    parser.add_argument("--durability", default="fsync", help="level of the server for mixed requests (default fsync)")
    parser.add_argument(
        "--recovery-secs",
        type=float,
        default=5.0,
        help="a recovery that takes longer is a problem (default 5)",
    )
    parser.add_argument(
        "--stall-secs",
        type=float,
        default=60.0,
        help="after the kills stop an executor for so long between a run and its settlement; 0 for not at all "
        "(default 60)",
    )
    parser.add_argument("--json", action="store_true", help="report as one JSON document")
    parser.add_argument("--keep", action="store_true", help="keep the state directory")
    return parser


class Stack:
    """The server under drill: `charonia serve` as a load wants it, or one that runs already."""

    def __init__(self, options: argparse.Namespace, load: str) -> None:
        self.own = options.state_dir is None
        self.shm_dir: Path | None = None
        self.state_dir = options.state_dir or Path(tempfile.mkdtemp(prefix="charonia-drill-"))
        self.points = self.state_dir / "fail-points"
        self._options = options
        self._load = load
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Stack:
        self.points.mkdir(parents=True, exist_ok=True)
        if self.own:
            repository = self._options.model_repository or Path("examples/models")
            with (self.state_dir / "serve.log").open("wb") as log:
                self._process = subprocess.Popen(
                    [
                        *_charonia(),
                        "serve",
                        "--model-repository",
                        str(repository),
                        "--state-dir",
                        str(self.state_dir),
                        "--http-port=0",
                        "--grpc-port=0",
                        "--metrics-port=0",
                        "--http-address=127.0.0.1",
                        "--grpc-address=127.0.0.1",
                        f"--fail-points={self.points}",
                        *self._flags(),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        try:
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _flags(self) -> list[str]:
        if self._load == "mixed":
            durability = f"--durability={self._options.durability}"
            return ["--executors=2", "--journal=all", durability, "--webhook-allow=127.0.0.1/32"]
        memory = Path("/dev/shm")
        self.shm_dir = Path(tempfile.mkdtemp(prefix="charonia-drill-", dir=memory if memory.is_dir() else None))
        return [f"--executors={1 if self._load == 'colocated' else 2}", f"--shm-dir={self.shm_dir}"]

    def log_url(self) -> str:
        return str(json.loads((self.state_dir / "endpoints.json").read_text())["log"])

    def pids(self, role: str) -> list[int]:
        processes = json.loads((self.state_dir / "processes.json").read_text())
        return [process["pid"] for process in processes if process["role"] == role]

    def address(self) -> str:
        return str(json.loads((self.state_dir / "endpoints.json").read_text())["http"])

    def wait_ready(self) -> None:
        give_up_s = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < give_up_s:
            if self._process is not None and self._process.poll() is not None:
                break
            try:
                if Client(self.address()).ask("GET", "/v2/health/ready")[0] == 200:
                    return
            except (OSError, ValueError, KeyError, Disconnected):
                pass
            time.sleep(0.02)
        raise LoadTestError(f"the server is not ready:\n{self.last_lines()}")

    def fenced(self) -> float:
        """Settlements that came after another one, by the metrics page."""
        where = json.loads((self.state_dir / "endpoints.json").read_text())["metrics"]
        with urllib.request.urlopen(f"http://{where}/metrics", timeout=10) as answer:
            page = answer.read().decode()
        return sum(float(number) for number in re.findall(r"^charonia_fenced_total{.*} (\S+)", page, re.MULTILINE))

    def last_lines(self) -> str:
        log = self.state_dir / "serve.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-20:]) if log.exists() else ""

    def command(self, *words: str) -> Any:
        """A `charonia` command on this stack, its JSON."""
        done = subprocess.run(
            [*_charonia(), *words, "--json", "--state-dir", str(self.state_dir)], capture_output=True, check=False
        )
        try:
            return json.loads(done.stdout)
        except ValueError:
            raise LoadTestError(f"charonia {' '.join(words)} failed: {done.stderr.decode()}") from None

    def stop(self) -> None:
        """End the server, if the drill started it."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def __exit__(self, *_error: object) -> None:
        self.stop()
        if self.shm_dir is not None:
            shutil.rmtree(self.shm_dir, ignore_errors=True)
        if self.own and not self._options.keep:
            shutil.rmtree(self.state_dir, ignore_errors=True)


def _charonia() -> list[str]:
    beside = Path(sys.executable).with_name("charonia")
    return [str(beside)] if beside.exists() else ["charonia"]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole drill; the report."""
    loads = ["mixed"] if options.state_dir is not None else options.loads.split(",")
    told = Told()
    kills: list[Kill] = []
    problems: list[str] = []
    hooks = Receiver()
    with hooks:
        for load in loads:
            wanted = list(cells(load, options.roles.split(","), options.steps.split(",")))
            if not wanted:
                continue
            with Stack(options, load) as server:
                carry_out = _mixed if load == "mixed" else _waves
                problems += carry_out(options, server, load, wanted, told, kills, hooks)
                if problems:
                    print(server.last_lines(), file=sys.stderr)
                    break
    return {
        "kills": [
            {
                "load": k.cell.load,
                "role": k.cell.role,
                "step": k.cell.step,
                "point": k.cell.point,
                "reached": k.reached,
                "recovered_s": round(k.recovered_s, 3),
                "problem": k.problem,
            }
            for k in kills
        ],
        "counts": dict(sorted(told.counts.items())),
        "webhooks": {"jobs": len(hooks.received), "deliveries": sum(hooks.received.values())},
        "problems": problems,
    }


def _mixed(
    options: argparse.Namespace,
    server: Stack,
    _load: str,
    wanted: list[Cell],
    told: Told,
    kills: list[Kill],
    hooks: Receiver,
) -> list[str]:
    """The kills under mixed requests; what was wrong."""
    stop = threading.Event()
    clients = [
        LoadClient(i, server.address(), options.model, told, stop, hooks.url if i % 8 == 2 else "")
        for i in range(options.clients)
    ]
    mine = _under_load(options, server, clients, stop, wanted, told, options.stall_secs)
    kills += mine
    problems = told.problems + [f"{k.cell}: {k.problem}" for k in mine if k.problem]
    return problems + _check_jobs(server, told) + _check_hooks(told, hooks) + _check_log(server)


def _waves(
    options: argparse.Namespace,
    server: Stack,
    load: str,
    wanted: list[Cell],
    told: Told,
    kills: list[Kill],
    _hooks: Receiver,
) -> list[str]:
    """The kills under requests in waves; what was wrong."""
    stop = threading.Event()
    clients = [WaveClient(i, server.address(), options.model, told, stop) for i in range(options.clients)]
    stall_s = options.stall_secs if load == "waves" else 0
    mine = _under_load(
        *(options, server, clients, stop, wanted, told, stall_s),
        lambda: are_riding(server.log_url(), options.model, server.pids("gateway")),
    )
    kills += mine
    problems = told.problems + [f"{k.cell}: {k.problem}" for k in mine if k.problem]
    give_up_s = time.monotonic() + SETTLE_WITHIN_S
    while (left := left_in(server.log_url(), 1)) and time.monotonic() < give_up_s:
        time.sleep(0.2)
    problems += left + check_statistics(server.address(), options.model) + _check_log(server)
    server.stop()
    return problems + (left_behind(server.shm_dir) if server.shm_dir is not None else [])


def _under_load(
    options: argparse.Namespace,
    server: Stack,
    clients: Sequence[threading.Thread],
    stop: threading.Event,
    wanted: list[Cell],
    told: Told,
    stall_s: float,
    is_loaded: Callable[[], bool] = lambda: True,
) -> list[Kill]:
    """Carry out kills while these clients ask; returns when they have ended."""
    kills: list[Kill] = []
    for client in clients:
        client.start()
    matrix = Matrix(
        *(server.state_dir, server.points, server.address, options.model, told, options.recovery_secs, is_loaded)
    )
    try:
        for cell in wanted:
            kills.append(_told_of(matrix.kill(cell), options))
            if told.problems:
                break
        if stall_s and not told.problems:
            kills.append(_told_of(matrix.stall(stall_s, server.fenced, wanted[0].load), options, "stalled"))
    finally:
        stop.set()
    for client in clients:
        client.join(90)
    return kills


def _told_of(kill: Kill, options: argparse.Namespace, what: str = "recovered") -> Kill:
    if not options.json:
        said = kill.problem or f"{what} in {kill.recovered_s:.2f} s"
        if what == "stalled":
            said = kill.problem or f"others took over in {kill.recovered_s:.2f} s, its late settlement was fenced off"
        print(f"{kill.cell!s:48} {said}", flush=True)
    return kill


def _check_jobs(server: Stack, told: Told) -> list[str]:
    """Every job its caller knows of has ended, and as the caller was told."""
    problems = []
    client = Client(server.address())
    for job, said in told.jobs.items():
        state = ""
        deadline_s = time.monotonic() + SETTLE_WITHIN_S
        while time.monotonic() < deadline_s:
            try:
                status, _, view = client.ask("GET", f"/v2/jobs/{job}")
            except Disconnected:
                time.sleep(0.1)
                continue
            state = view["state"] if status == 200 else f"HTTP {status}"
            if state not in ("queued", "running"):
                break
            time.sleep(0.05)
        wanted = ("succeeded",) if said == "accepted" else (said,)
        if state not in wanted:
            problems.append(f"job {job} is {state or 'unknown'}, its caller was told {said}")
    return problems


def _check_hooks(told: Told, hooks: Receiver) -> list[str]:
    """The webhook of every job that has one came, once or more often, each time with the id of its job."""
    deadline_s = time.monotonic() + SETTLE_WITHIN_S
    wanted = {f"msg_{job.partition('.')[0]}": job for job in told.hooked}
    while not wanted.keys() <= hooks.received.keys() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    problems = [f"the webhook of job {job} never came" for id, job in wanted.items() if id not in hooks.received]
    # a submission whose answer was lost has a webhook too, so more may come than we know jobs of
    return problems + [f"a webhook came with the id '{id}'" for id in hooks.received if not id.startswith("msg_")]


def _check_log(server: Stack) -> list[str]:
    problems = []
    deadline_s = time.monotonic() + SETTLE_WITHIN_S
    while True:
        queues = server.command("queue", "ls")
        left = sum(int(row["requests"]) for row in queues["queues"])
        if not left:
            break
        if time.monotonic() > deadline_s:
            problems.append(f"{left} requests are still in the queue {SETTLE_WITHIN_S:.0f} s after the load ended")
            break
        time.sleep(0.2)
    audit = server.command("audit")
    problems += [f"audit: {finding}" for finding in audit["findings"]]
    return problems


def main() -> int:
    options = parser().parse_args()
    unknown = set(options.roles.split(",")) - set(ROLES)
    unknown |= set(options.steps.split(",")) - set(EVERY_STEP)
    unknown |= set(options.loads.split(",")) - set(LOADS)
    if unknown:
        print(f"unknown roles, steps or loads: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    try:
        report = run(options)
    except LoadTestError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        reached = [kill for kill in report["kills"] if kill["reached"]]
        slowest = max((kill["recovered_s"] for kill in reached), default=0.0)
        print(f"\n{len(reached)} of {len(report['kills'])} kills reached their step; slowest recovery {slowest:.2f} s")
        for name, number in report["counts"].items():
            print(f"  {name:40} {number}")
        print(f"  {'webhook deliveries (jobs)':40} {report['webhooks']['deliveries']} ({report['webhooks']['jobs']})")
        for problem in report["problems"]:
            print(f"PROBLEM {problem}")
        print("clean" if not report["problems"] else f"{len(report['problems'])} problems")
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
