"""Runs the program of Debian's package `prometheus` on a free port, its data in a folder, and asks it."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .expressions import ALERTS, POOL, RELEASE

_READY_WITHIN_S = 60.0
_POLL_S = 0.1
_CONFIGURATION = """
global: {{scrape_interval: 1s, evaluation_interval: 5s}}
rule_files: ["{alerts}"]
scrape_configs:
"""
_JOB = """
  - job_name: {job}
    static_configs: [{{targets: ["{target}"], labels: {{charonia_release: "{release}", charonia_pool: "{pool}"}}}}]
"""


def program() -> str | None:
    """The path of `prometheus`, if it is installed."""
    return shutil.which("prometheus")


@contextmanager
def scraping(directory: Path, target: str, jobs: tuple[str, ...]) -> Iterator[Prometheus]:
    """A Prometheus that scrapes `target` (host:port) each second, once for each of `jobs`.

    Raises OSError without the program.
    """
    found = program()
    if found is None:
        raise FileNotFoundError("prometheus is not installed: apt-get install prometheus")
    configuration = directory / "prometheus.yml"
    jobs_text = "".join(_JOB.format(job=job, target=target, release=RELEASE, pool=POOL) for job in jobs)
    configuration.write_text(_CONFIGURATION.format(alerts=ALERTS) + jobs_text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [
        f"--config.file={configuration}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([found, *flags], stdout=log, stderr=log, cwd=directory)
    try:
        prometheus = Prometheus(address)
        prometheus.wait_ready(process)
        yield prometheus
    finally:
        process.terminate()
        process.wait()


class Prometheus:
    """Asks the one at `address` (host:port)."""

    def __init__(self, address: str) -> None:
        self._address = address

    def wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Raises OSError when it ends or does not become ready."""
        give_up_at = time.monotonic() + _READY_WITHIN_S
        while time.monotonic() < give_up_at and process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=5):
                    return
            except OSError:
                time.sleep(_POLL_S)
        raise OSError("prometheus is not ready; its log is in its folder")

    def series(self, expression: str) -> int:
        """How many series the expression has now. Raises ValueError with Prometheus's words for one that is refused."""
        return len(self._asked("query", query=expression))

    def series_with_values(self, expression: str, seconds: int) -> int:
        """How many series had a number, not NaN, at any second of the last `seconds`. Raises as `series`."""
        now = time.time()
        found = self._asked("query_range", query=expression, start=f"{now - seconds}", end=f"{now}", step="1")
        return sum(any(math.isfinite(float(value)) for _, value in series["values"]) for series in found)

    def _asked(self, way: str, **parameters: str) -> list[Any]:
        url = f"http://{self._address}/api/v1/{way}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                found: list[Any] = json.load(answer)["data"]["result"]
                return found
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(json.load(error)["error"]) from None
