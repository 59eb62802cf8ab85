"""The page of /metrics is what `docs/metrics.md` says: families, types and labels, and when counters begin at 0."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from e2e_asking import Gate, client, index, on_the_page, post, until
from e2e_load import ask_scaled
from e2e_models import gated, scaling
from prometheus_client.parser import text_string_to_metric_families

from charonia.catalog.catalog import UNLOADED
from charonia.eventlog.control import folded_control
from charonia.eventlog.redis import open_log

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `((?:nv|charonia)_\w+)` \| (\w+) \| ([\w, ]*)\|", re.MULTILINE)
PARTS_OF_A_VALUE = {"le", "quantile"}


def test_the_page_is_as_documented(few_models: Path, serve: Callable[..., Any]) -> None:
    rows = {
        name: (kind, set(re.findall(r"\w+", labels)))
        for name, kind, labels in ROW.findall((ROOT / "docs" / "metrics.md").read_text())
    }
    server = serve(
        few_models,
        "--allow-webhooks=true",
        "--metrics-config=summary_latencies=true",
        "--metrics-config=histogram_latencies=true",
        "--cache-config=local,size=1000000",
        "--rate-limit=execution_count",
    )

    def families() -> list[Any]:
        """Those of all parts: one that does not answer within two seconds is left out of a page."""
        found = list(text_string_to_metric_families(server.scrape()))
        return found if len(found) > 45 else []

    lines = (ROOT / "tests" / "golden" / "help_of_families.txt").read_text().splitlines()
    texts = dict(line.split(" ", 1) for line in lines)
    seen = set()
    for family in until("all parts are on the page", families):
        # the parser takes `_total` off a counter's name
        name = family.name if family.name in rows else family.name + "_total"
        assert name in rows, f"{family.name} is not in docs/metrics.md"
        kind, labels = rows[name]
        assert family.type == kind, name
        assert family.documentation == texts.get(name, family.documentation)
        for sample in family.samples:
            assert set(sample.labels) - PARTS_OF_A_VALUE == labels, sample
        seen.add(name)
    assert len(seen) > 45

    def health(name: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{server.metrics}/health/{name}", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    assert health("live") == (200, '{"live":true}')
    # the sender of webhooks is started last
    assert until("every part is ready", lambda: (found := health("ready"))[0] == 200 and found)[1] == '{"ready":true}'


def counted(model: str, count: int) -> list[str]:
    """What is on the page when gateways and executors agree that so many requests of a model were answered."""
    counters = ("nv_inference_request_success", "nv_inference_count")
    return [f'{counter}{{model="{model}",version="1"}} {count}\n' for counter in counters]


def test_counters_begin_at_0_after_an_unload_also_where_parts_were_started_again(
    tmp_path: Path, serve: Callable[..., Any]
) -> None:
    scaling(tmp_path / "models", "double", 2)
    server = serve(tmp_path / "models", "--model-control-mode=explicit", "--load-model=double")

    def ask(count: int) -> None:
        with client("http", server) as asking:
            for number in range(count):
                ask_scaled(asking, "http", "double", 2, number)

    ask(3)
    on_the_page(server, *counted("double", 3))
    for role in ("gateway", "executor+batcher"):
        (pid,) = server.pids(role)
        os.kill(pid, signal.SIGKILL)
        until(f"another {role} runs", lambda role=role, pid=pid: server.pids(role) not in ([], [pid]))
    server.wait_ready()
    ask(1)
    on_the_page(server, *counted("double", 4))  # of both, those that were killed too
    assert post(server, "/v2/repository/models/double/unload")[0] == 200
    until("it is unloaded", lambda: index(server)["double", "1"].get("reason") == "unloaded")
    assert post(server, "/v2/repository/models/double/load")[0] == 200
    ask(2)
    on_the_page(server, *counted("double", 2))


def test_counters_go_on_together_when_one_of_two_executors_has_the_version_all_along(
    tmp_path: Path, serve: Callable[..., Any]
) -> None:
    gated(tmp_path / "models", "gated", "max_batch_size: 1 instance_group [ { count: 1 kind: KIND_CPU } ]")
    server = serve(tmp_path / "models", "--executors=2", "--model-control-mode=explicit", "--load-model=gated")

    async def is_unloaded_somewhere() -> bool:
        log = open_log(server.log_url)
        await log.open()
        try:
            executors = (await folded_control(log)).executors.values()
        finally:
            await log.close()
        found = [view.versions.get("gated", 1) for view in executors]
        return any(version is not None and version.reason == UNLOADED for version in found)

    with ThreadPoolExecutor(3) as pool:
        with Gate(server, "gated", tmp_path, pool) as one, Gate(server, "gated", tmp_path, pool) as other:
            pass  # each executor has one
        for gate in (one, other):
            gate.request.result()
        on_the_page(server, *counted("gated", 2))
        with Gate(server, "gated", tmp_path, pool) as gate:
            assert post(server, "/v2/repository/models/gated/unload")[0] == 200
            until("the executor that has nothing to do has unloaded it", lambda: asyncio.run(is_unloaded_somewhere()))
            assert post(server, "/v2/repository/models/gated/load")[0] == 200
        gate.request.result()
    on_the_page(server, *counted("gated", 3))
