"""Asks all queries of boards, alerts and the Helm chart of a Prometheus that scrapes a server; none may be empty.

    python -m loadtest.boards [--seconds 20] [--verbose]

A panel's query has to have a series with a number within the load, one by which the chart scales a number above 0. An
alert's has to be one that Prometheus takes; whether it fires when it should is tested by
`infra/prometheus/alerts_test.yml`. Needs Debian's package `prometheus`.
The exit code is 0 when all is well, 1 when a query is empty or wrong, 2 without the program.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from loadtest.bench.servers import Charonia

from . import expressions, prometheus, served

_JOBS = ("gateway", "batcher", "executor", "webhooks")
"""The boards' and alerts' names of the parts; here each is the same page, that of `serve`."""
_RATE_INTERVAL_S = 10
_PATIENCE_S = 60.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="loadtest.boards", description=__doc__)
    parser.add_argument("--seconds", type=int, default=20, help="how long the load lasts at least (%(default)s)")
    parser.add_argument("--verbose", action="store_true", help="print how many series each query has")
    options = parser.parse_args(arguments)
    if prometheus.program() is None:
        print("prometheus is not installed: RUNLEVEL=1 apt-get install prometheus", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="charonia-boards-") as folder:
        found = asked(Path(folder), options.seconds)
    empty = [name for name, count in found.items() if not count]
    if options.verbose:
        for name, count in found.items():
            print(f"{count:4d}  {name}")
    for name in empty:
        print(f"no data: {name}", file=sys.stderr)
    print(
        f"{len(found)} queries of {len(expressions.BOARDS)} boards, {len(empty)} without data; "
        f"{len(expressions.of_alerts())} alerts taken"
    )
    return 1 if empty else 0


def asked(folder: Path, seconds: int) -> dict[str, int]:
    """Series with numbers by query. Asks again for a minute while some have none. Raises ValueError for a wrong
    query."""
    served.write_models(folder / "models")
    served.write_keys(folder / "keys.toml")
    server = Charonia(folder / "models", (*served.FLAGS, f"--api-keys={folder / 'keys.toml'}"))
    with (
        server as running,
        prometheus.scraping(folder, str(running.endpoints.metrics), _JOBS) as asking,
        served.loading(str(running.endpoints.http)),
    ):
        time.sleep(seconds)
        queries = expressions.of_boards(f"{_RATE_INTERVAL_S}s", f"{seconds}s")
        scaling = expressions.of_scaling(f"{seconds}s")
        queries |= {name: f"({query}) > 0" for name, query in scaling.items()}
        give_up_at = time.monotonic() + _PATIENCE_S
        while True:
            found = {name: asking.series_with_values(query, seconds) for name, query in queries.items()}
            if all(found.values()) or time.monotonic() > give_up_at:
                break
            time.sleep(1)
        for query in expressions.of_alerts().values():
            asking.series(query)
    return found


if __name__ == "__main__":
    sys.exit(main())
