"""`python -m loadtest.bench.budget`, `make bench-budget`: compares counts per request with the budgets, in a minute.

No time is measured and h2load is not needed, so it says the same on every machine, busy or idle. Requests leave in
waves (`waves.py`), which a busy machine still tears apart at times, or takes their model for too slow: a count over
budget is measured again after a pause, and the best attempt counts.
`--print` writes a budgets file from what is measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.calls import CountedServer, ask, counted
from loadtest.bench.cases import find, write_repository
from loadtest.bench.report import table
from loadtest.bench.scrape import read_appends, read_commands
from loadtest.bench.servers import Charonia, Endpoints
from loadtest.model import LoadTestError

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("budgets.toml")
ATTEMPTS = 5
PAUSE_S = 31.0
"""A gateway that took a model for too slow for waves tries it in waves again after 30 s (`gateway.lane.gathering`)."""
IDLE_S = 1.5
REQUESTS = {1: 300, 8: 1600, 64: 6400}
"""Requests by the number in flight, in whole waves: enough for a steady mean."""
FLOORS = {"requests_per_entry"}
"""Counts of which more is better."""
SLACK = {1: 1.03}
MANY_SLACK = 1.3


@dataclass(frozen=True)
class Budget:
    """One line of the file: a count of a model over a protocol with so many requests in flight, and its limit."""

    model: str
    protocol: str
    in_flight: int
    count: str
    limit: float

    def keeps(self, measured: float) -> bool:
        """Whether the measured count is within the limit."""
        return measured >= self.limit if self.count in FLOORS else measured <= self.limit


def parse(text: str) -> list[Budget]:
    """The budgets of a TOML text. Raises LoadTestError for a table, a count or a limit of the wrong form."""
    found = []
    try:
        for model, protocols in tomllib.loads(text).items():
            for protocol, levels in protocols.items():
                for level, counts in levels.items():
                    for count, limit in counts.items():
                        found.append(Budget(model, protocol, int(level), count, float(limit)))
    except (ValueError, AttributeError, TypeError) as error:
        raise LoadTestError(f"budgets are MODEL.PROTOCOL.IN_FLIGHT tables of numbers: {error}") from None
    for budget in found:
        if budget.count not in ("log_commands", "requests_per_entry", "calls") or budget.in_flight not in REQUESTS:
            raise LoadTestError(f"no such count: {budget.model}.{budget.protocol}.{budget.in_flight}.{budget.count}")
    return found


Counts = Mapping[str, float]
Measure = Callable[[str, str, int], Counts]


def count_log(endpoints: Endpoints, idle_per_s: float, model: str, protocol: str, in_flight: int) -> dict[str, float]:
    """Log commands per request and requests per entry, without those of the background."""
    if endpoints.log_url is None or endpoints.metrics is None:
        raise LoadTestError("the server names no log or no metrics port")
    requests = REQUESTS[in_flight]
    appends = read_appends(endpoints.metrics)
    commands, started = read_commands(endpoints.log_url), time.monotonic()
    ask(endpoints, model, protocol, in_flight, requests)
    seconds = time.monotonic() - started
    commands = read_commands(endpoints.log_url) - commands
    after = read_appends(endpoints.metrics)
    if appends is None or after is None or after[1] <= appends[1]:
        raise LoadTestError("the server does not count the entries of its log")
    return {
        "log_commands": max(0.0, commands - idle_per_s * seconds) / requests,
        "requests_per_entry": (after[0] - appends[0]) / (after[1] - appends[1]),
    }


def count_calls(server: CountedServer, model: str, protocol: str, in_flight: int) -> dict[str, float]:
    """Calls of Python functions per request, in all processes together."""
    requests = REQUESTS[in_flight]
    by_role = server.count(lambda: ask(server.endpoints, model, protocol, in_flight, requests), requests)
    return {"calls": sum(sum(functions.values()) for functions in by_role.values())}


def better(count: str, one: float, other: float) -> float:
    """The better of two measurements of a count."""
    return max(one, other) if count in FLOORS else min(one, other)


def judge(
    budgets: list[Budget], measure: Measure, pause: Callable[[float], None] = time.sleep
) -> Iterator[tuple[Budget, float]]:
    """Each budget with its best measurement of up to `ATTEMPTS`; a point is measured once for all its counts."""
    points = dict.fromkeys((one.model, one.protocol, one.in_flight) for one in budgets)
    for point in points:
        here = [one for one in budgets if (one.model, one.protocol, one.in_flight) == point]
        best: dict[str, float] = {}
        for attempt in range(ATTEMPTS):
            if attempt:
                pause(PAUSE_S)
            for count, value in measure(*point).items():
                best[count] = better(count, value, best.get(count, value))
            if all(one.keeps(best[one.count]) for one in here):
                break
        yield from ((one, best[one.count]) for one in here)


def measured(budgets: list[Budget]) -> list[tuple[Budget, float]]:
    """Measures every budget on this checkout's server: log and entries on a plain one, calls on a counted one."""
    models = tuple(dict.fromkeys(one.model for one in budgets))
    results: list[tuple[Budget, float]] = []
    with tempfile.TemporaryDirectory(prefix="loadtest-models-") as home:
        repository = Path(home)
        write_repository(repository, find(",".join(models)), ROOT / "examples" / "models")
        of_log = [one for one in budgets if one.count != "calls"]
        of_calls = [one for one in budgets if one.count == "calls"]
        if of_log:
            with Charonia(repository) as server:
                ends = server.endpoints
                for model in models:
                    for protocol in ("http", "grpc"):
                        ask(ends, model, protocol, 64, REQUESTS[64] // 4)
                before, started = read_commands(str(ends.log_url)), time.monotonic()
                time.sleep(IDLE_S)
                idle_per_s = (read_commands(str(ends.log_url)) - before) / (time.monotonic() - started)
                results += judge(of_log, lambda m, p, n: count_log(ends, idle_per_s, m, p, n))
        if of_calls:
            with counted(repository, models) as counting:
                results += judge(of_calls, lambda m, p, n: count_calls(counting, m, p, n))
    order = {one: index for index, one in enumerate(budgets)}
    return sorted(results, key=lambda pair: order[pair[0]])


def as_toml(results: list[tuple[Budget, float]]) -> str:
    """Budgets at the measured values, with the slack that the file's head names."""
    lines: list[str] = []
    last = None
    for one, value in results:
        if (one.model, one.protocol, one.in_flight) != last:
            last = (one.model, one.protocol, one.in_flight)
            lines += ["", f"[{one.model}.{one.protocol}.{one.in_flight}]"]
        slack = SLACK.get(one.in_flight, MANY_SLACK)
        limit = value / slack if one.count in FLOORS else value * slack
        if one.count in FLOORS and one.in_flight == 1:
            limit = 1.0
        lines.append(f"{one.count} = {limit:.0f}" if limit >= 100 else f"{one.count} = {limit:.2f}")
    return "\n".join(lines[1:]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0; 1 when a count is over its budget; 2 when it could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.budget", description=__doc__.split("\n\n")[0])
    parser.add_argument("--budgets", type=Path, default=FILE, metavar="FILE")
    parser.add_argument("--print", action="store_true", help="print budgets at what is measured, and judge nothing")
    options = parser.parse_args(arguments)
    try:
        results = measured(parse(options.budgets.read_text()))
    except (LoadTestError, OSError) as error:
        print(f"loadtest.bench.budget: {error}", file=sys.stderr)
        return 2
    if options.print:
        print(as_toml(results), end="")
        return 0
    rows = [["model", "protocol", "in flight", "count per request", "measured", "budget", ""]]
    for one, value in results:
        word = "ok" if one.keeps(value) else "OVER BUDGET" if one.count not in FLOORS else "BELOW BUDGET"
        name = "requests per entry" if one.count == "requests_per_entry" else one.count.replace("_", " ")
        rows.append([one.model, one.protocol, str(one.in_flight), name, f"{value:.2f}", f"{one.limit:g}", word])
    print(table(rows, 4))
    return 0 if all(one.keeps(value) for one, value in results) else 1


if __name__ == "__main__":
    sys.exit(main())
