"""The command: brings the compose stack up, puts it under load, changes it in every way, and counts what went wrong.

The load is plain requests, keyed ones and jobs (`loadtest.drill`), and sequences, ensembles, models that call models
and streams over HTTP and gRPC (`feature_clients`). Before it, what is begun at one gateway is read at another
(`crossing`).

Zero lost always. Zero failed while executors come and go, while services are upgraded and while batchers and executors
are killed; while a gateway or the log is killed keyless calls may be cut off, and callers with an Idempotency-Key get
their answer by asking again (retries are printed). Exit 0 when all of it holds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtest.boards import expressions
from loadtest.boards.prometheus import Prometheus
from loadtest.drill.clients import Client, Disconnected, LoadClient, Told, request_body
from loadtest.model import LoadTestError

from .compose import Stack, wait_for
from .feature_clients import one_of_each
from .models import FEATURES, write_features, write_sleeper

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ASKED = ("identity", "magika")
SLEEP_S = 0.4
WINDOW_S = 16.0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.stack", description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=16, metavar="N")
    parser.add_argument("--project", default="charonia-test", help="compose project name (default charonia-test)")
    parser.add_argument("--json", action="store_true", help="report as one JSON document")
    parser.add_argument("--keep", action="store_true", help="leave the stack running")
    return parser


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _models(directory: Path) -> Path:
    """The example models that are asked and those of the test, readable for the containers' user."""
    for model in ASKED:
        shutil.copytree(EXAMPLES / "models" / model, directory / "models" / model)
    write_sleeper(directory / "models", SLEEP_S)
    write_features(directory / "models")
    for path in [directory, *directory.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return directory / "models"


class Test:
    """One run: the stack, its load, and the figures as they come."""

    __test__ = False

    def __init__(self, stack: Stack, ports: dict[str, int], clients: int) -> None:
        self._stack = stack
        self._ports = ports
        self.http = f"127.0.0.1:{ports['HTTP_PORT']}"
        self.told = Told()
        self._stop = threading.Event()
        self._clients = [LoadClient(i, self.http, "identity", self.told, self._stop) for i in range(clients)]
        self._clients += one_of_each(self.http, f"127.0.0.1:{ports['GRPC_PORT']}", self.told, self._stop)
        self.figures: dict[str, Any] = {}

    def note(self, name: str, figure: Any) -> None:
        self.figures[name] = figure
        print(f"{name:52} {figure}", file=sys.stderr, flush=True)

    def examples(self) -> None:
        """The example clients, as a user runs them, through the published ports."""
        program = EXAMPLES / "client.py"
        for protocol, port in (("http", "HTTP_PORT"), ("grpc", "GRPC_PORT")):
            for model in ASKED:
                url = f"127.0.0.1:{self._ports[port]}"
                done = subprocess.run(
                    [sys.executable, str(program), f"--model={model}", f"--protocol={protocol}", f"--url={url}"],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if done.returncode:
                    self.told.problem(f"example client for {model} over {protocol}: {done.stderr.strip()[-300:]}")
        self.note("example clients", "HTTP and gRPC")

    def wait_served(self) -> None:
        """Until every model of the test is."""
        client = Client(self.http)
        for model in FEATURES:
            path = f"/v2/models/{model}/ready"
            wait_for(lambda path=path: client.ask("GET", path)[0] == 200, f"{model} is served")  # type: ignore[misc]
        client.close()

    def crossing(self) -> None:
        """What is begun at one gateway is read at another."""
        program = Path(__file__).with_name("crossing.py").read_text()
        report = json.loads(self._stack.compose("exec", "-T", "gateway", "python3", "-", given=program))
        for problem in report["problems"]:
            self.told.problem(f"over {report['gateways']} gateways: {problem}")
        self.note(f"tried over {report['gateways']} gateways", ", ".join(report["tried"]))

    def executors(self, number: int) -> None:
        """`charonia executors ls` knows them all."""
        rows = self._stack.charonia("executors", "ls")["executors"]
        ready = [row for row in rows if row["state"] == "ready" and row["pool"] == "cpu"]
        if len(ready) != number:
            self.told.problem(f"there are {number} executors in the pool 'cpu', 'executors ls' says {rows}")
        self.note("executors ls", f"{len(ready)} ready, each with {min(row['loaded'] for row in rows)} models")

    def refusals(self) -> None:
        """No part was refused a command by the log's users, but for the one that all ask and only gateways need."""
        refused = self._stack.refused_commands()
        asked_by_all = refused.pop("config|get", 0)
        for command, times in refused.items():
            self.told.problem(f"the log refused {command} {times} times")
        self.note(
            "commands refused by the log, of them config get", f"{asked_by_all + sum(refused.values())}, {asked_by_all}"
        )

    def throughput(self, executors: int) -> float:
        """Answers per second of the sleeping model with this many executors, one instance each."""
        self._stack.scale("executor", executors)
        wait_for(lambda: self._served_by(executors), f"{executors} executors serve the sleeping model")
        answered = 0
        lock = threading.Lock()
        end_s = time.monotonic() + WINDOW_S

        def ask() -> None:
            nonlocal answered
            client = Client(self.http)
            body = {"inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [1.0]}]}
            while time.monotonic() < end_s:
                try:
                    status, _, _ = client.ask("POST", "/v2/models/sleeper/infer", body)
                except Disconnected as error:
                    self.told.problem(f"sleeper: {error}")
                    return
                if status != 200:
                    self.told.problem(f"sleeper got {status}")
                    return
                with lock:
                    answered += time.monotonic() < end_s
            client.close()

        threads = [threading.Thread(target=ask) for _ in range(4 * executors)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answered / WINDOW_S

    def _served_by(self, executors: int) -> bool:
        return len(self._stack.containers("executor")) == executors and self._all_answer(executors)

    def _all_answer(self, executors: int) -> bool:
        """As many calls at once as there are executors take the time of one: each has its own executor."""
        body = {"inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [1.0]}]}

        def ask() -> None:
            client = Client(self.http)
            try:
                client.ask("POST", "/v2/models/sleeper/infer", body)
            except Disconnected:
                time.sleep(SLEEP_S)
            client.close()

        began_s = time.monotonic()
        threads = [threading.Thread(target=ask) for _ in range(executors)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - began_s < 1.9 * SLEEP_S

    def start_load(self) -> None:
        for client in self._clients:
            client.start()

    def end_load(self) -> None:
        self._stop.set()
        for client in self._clients:
            if client.ident is not None:
                client.join(90)
                if client.is_alive():
                    self.told.problem(f"{client.name} does not end")

    def step(self, name: str, act: Callable[[], float], *, excused: bool = False) -> None:
        """One change under load. `excused`: keyless calls may be cut off meanwhile."""
        self.told.excused = excused
        before = len(self.told.problems)
        seconds = act()
        self.wait_answered()
        if excused:
            self.told.excused_until_s = time.monotonic() + 1.0
        self.told.excused = False
        problems = len(self.told.problems) - before
        self.note(name, f"{seconds:.1f} s" + (f", {problems} problems" if problems else ""))

    def wait_answered(self) -> None:
        """Until a request of ours is answered."""

        def answers() -> bool:
            client = Client(self.http)
            try:
                return client.ask("POST", "/v2/models/identity/infer", request_body([0.5] * 16))[0] == 200
            except Disconnected:
                return False
            finally:
                client.close()

        wait_for(answers, "a request is answered")

    def check(self) -> None:
        """Nothing is left in the queue, every job has the end its caller was told, and the journal adds up."""
        try:
            wait_for(lambda: not self._waiting(), "the queue is empty")
        except LoadTestError as error:
            self.told.problem(str(error))
            for model in self._waiting():
                left = self._stack.charonia("queue", "inspect", model)["queue"]
                self.told.problem(f"left of model '{model}': {json.dumps(left)}")
        client = Client(self.http)
        lost = 0
        for job, said in self.told.jobs.items():
            status, _, view = client.ask("GET", f"/v2/jobs/{job}")
            state = view["state"] if status == 200 else f"HTTP {status}"
            if state != ("succeeded" if said == "accepted" else said):
                lost += 1
                self.told.problem(f"job {job} is {state}, its caller was told {said}")
        self.note("jobs accepted, lost", f"{len(self.told.jobs)}, {lost}")
        findings = self._stack.charonia("audit")["findings"]
        for finding in findings:
            self.told.problem(f"audit: {finding}")
        self.note("audit", "clean" if not findings else f"{len(findings)} findings")

    def _waiting(self) -> list[str]:
        """Models with requests that have not ended."""
        return [queue["model"] for queue in self._stack.charonia("queue", "ls")["queues"] if int(queue["requests"])]

    def queries(self) -> None:
        """The boards' and the alerts' expressions are taken by the stack's own Prometheus, and panels have data."""
        prometheus = Prometheus(f"127.0.0.1:{self._ports['PROMETHEUS_PORT']}")
        queries = expressions.of_boards() | expressions.of_alerts()
        found = {name: prometheus.series(text) for name, text in queries.items()}
        for panel in ("Answers per second, {{model}}", "Waiting requests, {{model}}", "Parts that answer, {{job}}"):
            if not found[f"overview: {panel}"]:
                self.told.problem(f"the panel '{panel}' has no data")
        self.note("expressions asked, with data", f"{len(found)}, {sum(map(bool, found.values()))}")

    def run(self) -> None:
        stack = self._stack
        self.note("up and healthy", f"{stack.up('--build'):.1f} s")
        self.wait_answered()
        self.wait_served()
        self.examples()
        self.crossing()
        rates = {n: self.throughput(n) for n in (1, 2, 3)}
        self.executors(3)
        for number, rate in rates.items():
            self.note(f"answers/s of the sleeping model, {number} executors", f"{rate:.1f} ({rate / rates[1]:.2f}x)")
        if rates[3] / rates[1] < 2.9:
            self.told.problem(f"three executors do {rates[3] / rates[1]:.2f} times the work of one, expected 2.9")
        stack.scale("executor", 1)
        self.start_load()
        self.step("executors 1 to 3 under load", lambda: stack.scale("executor", 3))
        self.step("executors 3 to 1 under load", lambda: stack.scale("executor", 1))
        stack.scale("executor", 2)
        self.step("executor killed", lambda: stack.kill("executor"))
        self.step("batcher killed", lambda: stack.kill("batcher"))
        for service in ("executor", "batcher", "gateway"):
            self.step(f"{service} upgraded, slowest drain", lambda service=service: stack.roll(service))  # type: ignore[misc]
        self.step("gateway killed", lambda: stack.kill("gateway"), excused=True)
        self.refusals()
        self.step("redis killed", lambda: stack.kill("redis"), excused=True)
        self.queries()
        self.end_load()
        self.check()


def main() -> int:
    options = parser().parse_args()
    directory = Path(tempfile.mkdtemp(prefix="charonia-stack-"))
    ports = {name: _free_port() for name in ("HTTP_PORT", "GRPC_PORT", "PROMETHEUS_PORT")}
    environment = {"MODELS": str(_models(directory)), "JOURNAL": "all", "DURABILITY": "fsync", "EXECUTORS": "1"}
    stack = Stack(options.project, environment | {name: str(port) for name, port in ports.items()})
    test = Test(stack, ports, options.clients)
    try:
        test.run()
    except (LoadTestError, Disconnected) as error:
        test.told.problem(str(error))
    finally:
        test.end_load()
        if test.told.problems:
            print(stack.logs(), file=sys.stderr)
        if not options.keep:
            stack.down()
        shutil.rmtree(directory, ignore_errors=True)
    report = {
        "figures": test.figures,
        "counts": dict(sorted(test.told.counts.items())),
        "problems": test.told.problems,
    }
    print(json.dumps(report, indent=1) if options.json else _text(report))
    return 1 if test.told.problems else 0


def _text(report: dict[str, Any]) -> str:
    lines = [f"{name:52} {number}" for name, number in report["counts"].items()]
    for problem, times in Counter(report["problems"]).items():
        lines.append(f"PROBLEM {problem}" + (f" ({times} times)" if times > 1 else ""))
    return "\n".join([*lines, "clean" if not report["problems"] else f"{len(report['problems'])} problems"])


if __name__ == "__main__":
    sys.exit(main())
