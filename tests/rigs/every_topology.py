"""`make topologies`: the tests that need a log, over each kind of log there is, and how many ran on each.

Each topology (`topologies`) is a run of pytest of its own: the contract of the log (without users, since its streams
have names of its own), the services over it, and whole servers with stock clients. `--short` is two topologies and the
tests that reach furthest, for CI. Exit status 1 when a test failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from log_servers import server_with_tls
from topologies import VARIABLE

REPOSITORY = Path(__file__).resolve().parents[2]
TOPOLOGIES = ("single", "single,acl", "single,tls", "sentinel", "cluster", "sentinel,tls,acl", "cluster,tls,acl")
SHORT = ("sentinel,tls,acl", "cluster,tls,acl")
CONTRACT = tuple(
    f"contract/test_{name}"
    for name in (
        "accepted_work",
        "adapters_agree",
        "event_log",
        "job_lists",
        "jobs",
        "journal",
        "notes_and_times",
        "progress",
        "streams",
        "waves",
    )
)
SERVICES = tuple(
    f"integration/test_{name}"
    for name in (
        "batcher_losses",
        "batcher_service",
        "batching_jobs",
        "console_actions",
        "console_pages",
        "gateway_jobs",
        "journal_seals",
        "lost_streams",
        "moved_requests",
        "operations",
        "poison",
        "response_cache",
        "resumed_streams",
        "resumed_texts",
        "stored_files",
        "unforeseen_errors",
        "wave_losses",
        "webhook_processes",
        "webhooks",
    )
)
WHOLE = tuple(
    f"e2e/test_{name}"
    for name in (
        "bls",
        "ensembles",
        "gateways",
        "job_survival",
        "jobs",
        "model_control",
        "model_polling",
        "models_on_demand",
        "openai_stored",
        "operations",
        "poison",
        "pools",
        "restart_storm",
        "resumed_lines",
        "separate_parts",
        "sequence_failover",
        "sequences",
        "streaming",
        "tenants",
        "webhooks",
    )
)
OVER_ONE_SERVER = {
    "of fronts, models and processes, which reach the log by what is tested above": (
        *(
            "analyzer",
            "bound",
            "client_shm",
            "cloud_fronts",
            "clients",
            "console",
            "console_stories",
            "hanging_models",
            "heartbeats",
            "hostile",
            "hostile_connections",
            "hostile_models",
            "http2",
        ),
        *("inprocess", "inprocess_lives", "lost_overrides", "prefill_decode", "trtllm_tensors"),
        *("instances", "large_tensors", "load", "metrics", "namespaces", "prompt_routing", "releases", "replay"),
        "rolling_upgrade",
        *("openai_api", "openai_tasks", "openai_tenants", "openapi", "processes"),
        "python_features",
        *("python_client", "python_models", "remote_models", "stalls", "stock_examples"),
        *(
            "observed_replies",
            "receipts",
            "response_cache",
            "tuner",
            "scheduling",
            "sequence_streams",
            "several_gateways",
            "stalled_executor",
            "tracing",
            "tutorials",
        ),
        "unwanted_runs",
    ),
    "of state directories, which have a private log": ("state_moves", "upgrades"),
    "over servers of their own": ("cluster", "drill", "failover", "log_failures", "predictions", "waves"),
}
"""Tests of whole servers that are not made over other topologies, and why."""
SHORT_PARTS = ("integration/test_gateway_jobs", "integration/test_operations", "e2e/test_gateways", "e2e/test_pools")
OF_OTHER_LOGS = "not [memory and not [cluster"
"""Cases that are not over the log of the run."""


def run(topology: str, files: tuple[str, ...], flags: list[str]) -> dict[str, int]:
    """How many tests passed, failed and were skipped."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        words = [sys.executable, "-m", "pytest", f"--junitxml={report}", "-k", OF_OTHER_LOGS, "-rfEs", *flags]
        words += [f"tests/{file}.py" for file in files]
        subprocess.run(words, cwd=REPOSITORY, env={**os.environ, VARIABLE: topology}, check=False)
        suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    said = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = said["failures"] + said["errors"]
    return {"passed": said["tests"] - failed - said["skipped"], "failed": failed, "skipped": said["skipped"]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make topologies", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("topologies", nargs="*", metavar="TOPOLOGY", help=f"of {' '.join(TOPOLOGIES)} (default: all)")
    parser.add_argument("--short", action="store_true", help="two topologies and few tests")
    parser.add_argument("--flags", default="", help="more words for pytest")
    options = parser.parse_args()
    names = options.topologies or (SHORT if options.short else TOPOLOGIES)
    if not server_with_tls():
        left_out = [name for name in names if "tls" in name]
        print(f"no server with TLS (CHARONIA_TEST_TLS_SERVER): left out {' '.join(left_out)}", flush=True)
        names = [name for name in names if "tls" not in name]
    rows = []
    for name in names:
        parts = (
            {"short": SHORT_PARTS} if options.short else {"contract": CONTRACT, "services": SERVICES, "whole": WHOLE}
        )
        for part, files in parts.items():
            began_s = time.monotonic()
            over = name.replace(",acl", "") if part == "contract" else name
            counts = run(over, files, options.flags.split())
            rows.append((name, part, counts, time.monotonic() - began_s))
    print(f"\n{'topology':20} {'tests':10} {'passed':>6} {'failed':>6} {'skipped':>7} {'seconds':>7}")
    for name, part, counts, seconds in rows:
        print(f"{name:20} {part:10} {counts['passed']:6} {counts['failed']:6} {counts['skipped']:7} {seconds:7.0f}")
    return 1 if any(counts["failed"] for _, _, counts, _ in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
