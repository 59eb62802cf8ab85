"""Measures points: one (case, protocol, in flight) on one server, all servers in turn, round after round.

A point's window begins after h2load's warm-up. Requests, latencies, CPU, context switches and log commands are those
of the same window; requests per entry are those of the whole run. Servers take turns at each point, and every second
round in reverse, so that work of others on the machine meets them alike.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.measurement import percentile
from loadtest.model import LoadTestError

from .calls import counted
from .cases import Case
from .h2load import load, send
from .messages import Message, check, grpc_message, http_message, mixed_message
from .processes import load_roles, machine_busy_ns, members, usage_by_role, usage_of
from .scrape import read_appends, read_commands
from .servers import Endpoints

WARM_S = 0.35
EDGES_S = (0.05, 0.25)
"""Between the generator's own warm-up and the window, and between the window and the generator's end."""
ATTEMPTS = 3
IDLE_S = 1.5
ENOUGH_ANSWER = 0.98
"""h2load counts a gRPC error as a success, so the mean answer must have this share of the checked answer's size."""


@dataclass
class Server:
    """A running server: its name in the report, its addresses, its dialect and where its processes are found.

    `roles` gives role by process id; `revive` restarts a server that died under load and returns it, if it can.
    """

    name: str
    endpoints: Endpoints
    roles: Callable[[], Mapping[int, str]]
    http_style: str = "v2bin"
    revive: Callable[[], Server] | None = None
    idle_commands_per_s: float = 0.0

    def message(self, case: Case, protocol: str) -> tuple[Message, str] | None:
        """The request of a case and the address for it; None when the server does not speak the protocol."""
        if case.name == "mixed":
            address = self.endpoints.grpc if protocol == "grpc" else self.endpoints.http
            return (mixed_message(protocol), address) if address and self.http_style == "v2bin" else None
        if protocol == "grpc":
            return (grpc_message(case), self.endpoints.grpc) if self.endpoints.grpc else None
        return (http_message(case, self.http_style), self.endpoints.http) if self.endpoints.http else None


def charonia_server(name: str, endpoints: Endpoints) -> Server:
    """A Charonia whose state directory is readable here; its log's idle commands are measured."""
    file = endpoints.processes_file
    server = Server(name, endpoints, lambda: load_roles(file, models=True) if file else {})
    if endpoints.log_url:
        before, started = read_commands(endpoints.log_url), time.monotonic()
        time.sleep(IDLE_S)
        server.idle_commands_per_s = (read_commands(endpoints.log_url) - before) / (time.monotonic() - started)
    return server


@dataclass(frozen=True)
class Point:
    """One measured window. Per request: CPU microseconds and voluntary context switches by role, log commands
    without those of an idle server. `other_cores` is what the rest of the machine was busy with."""

    rate: float
    p50_us: float
    p99_us: float
    requests: int
    wrong: int
    cpu_us: Mapping[str, float] = field(default_factory=dict)
    switches: Mapping[str, float] = field(default_factory=dict)
    generator_us: float = 0.0
    other_cores: float = 0.0
    log_commands: float | None = None
    requests_per_entry: float | None = None

    @property
    def server_us(self) -> float:
        """CPU of all processes of the server."""
        return sum(self.cpu_us.values())

    @property
    def wakeups(self) -> float:
        """Voluntary context switches of all processes of the server."""
        return sum(self.switches.values())


@dataclass(frozen=True)
class Key:
    """What is compared: a model, a protocol and a number of requests in flight."""

    case: str
    protocol: str
    in_flight: int


def window_s(case: Case, in_flight: int, duration_s: float) -> tuple[float, float]:
    """Warm-up and measured seconds: at least two answers of every caller fit into both."""
    turn_s = case.cost_s * in_flight
    return max(WARM_S, turn_s), max(duration_s, 2 * turn_s)


def measure(server: Server, case: Case, message: Message, address: str, in_flight: int, duration_s: float,
            answer_bytes: int) -> Point:  # fmt: skip
    """One point. Raises LoadTestError when the server answers nothing or with answers that are too short."""
    ends = server.endpoints
    warm_s, measured_s = window_s(case, in_flight, duration_s)
    appends_before = read_appends(ends.metrics) if ends.metrics else None
    roles = members(server.roles())
    with load(message, address, in_flight, warm_s, measured_s + sum(EDGES_S)) as run:
        run.wait_started()
        time.sleep(warm_s + EDGES_S[0])
        commands = read_commands(ends.log_url) if ends.log_url else 0
        usage, generator, busy_ns, start_ns = usage_by_role(roles), usage_of(run.pid), machine_busy_ns(), time.time_ns()
        time.sleep(measured_s)
        end_ns, busy_ns = time.time_ns(), machine_busy_ns() - busy_ns
        used = {role: total.since(usage[role]) for role, total in usage_by_role(roles).items()}
        ended_early = not run.alive
        generated = usage_of(run.pid).since(generator)
        commands = read_commands(ends.log_url) - commands if ends.log_url else 0
        outcome = run.outcome(warm_s + measured_s + 30)
    appends = read_appends(ends.metrics) if ends.metrics else None
    inside = [s for s in outcome.samples if start_ns <= (s.start_us + s.latency_us) * 1000 < end_ns]
    if ended_early:
        raise LoadTestError(f"the load generator ended early: {outcome.text[-200:].strip()}")
    if not inside:
        raise LoadTestError(f"{server.name}: no answer within {measured_s:g} s")
    if outcome.answer_bytes < answer_bytes * ENOUGH_ANSWER:
        raise LoadTestError(f"{server.name}: answers of {outcome.answer_bytes:.0f} bytes, {answer_bytes} expected")
    if not message.body and not all(sample.ok for sample in inside):
        print(f"{server.name}: {outcome.text.strip()}", file=sys.stderr)
    seconds, count = (end_ns - start_ns) / 1e9, len(inside)
    latencies = sorted(sample.latency_us for sample in inside)
    total_ns = sum(one.cpu_ns for one in used.values()) + generated.cpu_ns
    per_entry = None
    if appends and appends_before and appends[1] > appends_before[1]:
        per_entry = (appends[0] - appends_before[0]) / (appends[1] - appends_before[1])
    return Point(
        rate=count / seconds,
        p50_us=percentile(latencies, 50),
        p99_us=percentile(latencies, 99),
        requests=count,
        wrong=sum(not sample.ok for sample in inside),
        cpu_us={role: one.cpu_ns / 1e3 / count for role, one in used.items()},
        switches={role: one.switches / count for role, one in used.items()},
        generator_us=generated.cpu_ns / 1e3 / count,
        other_cores=max(0.0, (busy_ns - total_ns) / 1e9 / seconds),
        log_commands=max(0.0, commands - server.idle_commands_per_s * seconds) / count if ends.log_url else None,
        requests_per_entry=per_entry,
    )


def keys(cases: Sequence[Case], protocols: Sequence[str], levels: Sequence[int]) -> Iterator[tuple[Case, Key]]:
    """All points of a run, in the order in which they are measured."""
    for case in cases:
        for protocol in protocols:
            for level in levels:
                yield case, Key(case.name, protocol, level)


def count_calls(
    name: str, checkout: Path, options: Sequence[str], repository: Path, cases: Sequence[Case],
    protocols: Sequence[str], levels: Sequence[int],
) -> Calls:  # fmt: skip
    """Serves a checkout once more with its calls counted, and counts them at every point."""
    found: Calls = {}
    with counted(repository, (), checkout, tuple(options)) as counting:
        server = Server(name, counting.endpoints, counting.roles)
        for case, key in keys(cases, protocols, levels):
            what = server.message(case, key.protocol)
            if what is None or not what[0].body:
                continue
            requests = max(20, 2 * key.in_flight) if case.cost_s else max(200, 16 * key.in_flight)
            try:
                send(*what, key.in_flight, requests)  # what is done once for new connections and shapes
                by_role = counting.count(functools.partial(send, *what, key.in_flight, requests), requests)
            except LoadTestError as error:
                print(f"calls not counted: {key.case} {key.protocol} {key.in_flight} {name}: {error}", file=sys.stderr)
                continue
            found[key, name] = {role: sum(functions.values()) for role, functions in by_role.items()}
            total = sum(found[key, name].values())
            print(f"calls {key.case} {key.protocol} {key.in_flight} {name}: {total:.0f} a request", file=sys.stderr)
    return found


def favour() -> bool:
    """Favours this process and what it starts, servers and generators alike (nice -10), where that is allowed."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, min(os.getpriority(os.PRIO_PROCESS, 0), -10))
    except OSError:
        return False
    return True


Calls = dict[tuple[Key, str], dict[str, float]]
"""By key and server: calls of Python functions per request, by role."""

Results = dict[Key, dict[str, list[Point | None]]]
"""By key and server, one entry per round; None for a point that failed."""


def checked(servers: Sequence[Server], cases: Sequence[Case], protocols: Sequence[str], repository: Path) -> dict[
    tuple[str, str, str], tuple[Message, str, int]
]:  # fmt: skip
    """Message, address and answer size of every (server, case, protocol) that answers right; the rest is reported."""
    ready = {}
    for server in servers:
        for case in cases:
            for protocol in protocols:
                found = server.message(case, protocol)
                if found is None:
                    continue
                try:
                    size = check(*found, case, repository) if found[0].body else 0
                except LoadTestError as error:
                    print(f"left out: {server.name}, {case.name}, {protocol}: {error}", file=sys.stderr)
                    continue
                ready[server.name, case.name, protocol] = (*found, size)
    return ready


def _attempt(
    servers: list[Server], index: int, case: Case, what: tuple[Message, str, int], in_flight: int, duration_s: float
) -> tuple[Point | None, str]:
    """A point and its line for the user; one that fails is tried again, a server that died is revived for it."""
    for attempt in range(ATTEMPTS):
        server = servers[index]
        try:
            point = measure(server, case, what[0], what[1], in_flight, duration_s, what[2])
            return point, f"{point.rate:8.0f}/s  p50 {point.p50_us:7.0f} us  server {point.server_us:7.1f} us"
        except LoadTestError as error:
            if server.revive is not None and not any(Path(f"/proc/{pid}").exists() for pid in server.roles()):
                servers[index] = server.revive()
            elif attempt + 1 == ATTEMPTS:
                return None, f"FAILED: {error}"
    return None, f"FAILED: {servers[index].name} died {ATTEMPTS} times"


def run_rounds(
    servers: list[Server],
    cases: Sequence[Case],
    protocols: Sequence[str],
    levels: Sequence[int],
    repository: Path,
    rounds: int,
    duration_s: float,
    record: Callable[[dict[str, Any]], None] = lambda _: None,
) -> Results:
    """All rounds over all points; every point is also handed to `record` as a document as soon as it is measured."""
    ready = checked(servers, cases, protocols, repository)
    results: Results = {}
    for number in range(rounds):
        for case, key in keys(cases, protocols, levels):
            for index in range(len(servers)) if number % 2 == 0 else reversed(range(len(servers))):
                server = servers[index]
                what = ready.get((server.name, key.case, key.protocol))
                if what is None:
                    continue
                point, text = _attempt(servers, index, case, what, key.in_flight, duration_s)
                print(f"round {number + 1}/{rounds} {key.case} {key.protocol} {key.in_flight} {server.name}: {text}",
                      file=sys.stderr)  # fmt: skip
                results.setdefault(key, {}).setdefault(server.name, []).append(point)
                record({**asdict(key), "server": server.name, "round": number, **(asdict(point) if point else {})})
    return results
