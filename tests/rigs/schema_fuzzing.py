"""Schemathesis against a running server: does it do what `/openapi.json` says, whatever a request holds?

`python tests/rigs/schema_fuzzing.py` (`make fuzz-openapi`) is the long form, over a server of its own; the short one is
a test.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL, RELOADED = "identity", "magika"
"""The model that requests ask for, and the one that they load and unload."""

CHECKS = (
    "no_unforeseen_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
)
"""Left out are the checks that no request gets 500 and that invalid ones get 4xx (Triton answers 500 to malformed JSON
and ignores unknown members), and that valid ones get 200: a schema does not say which tensors a model takes."""


@dataclass(frozen=True)
class Findings:
    """`passed` is whether all was as the document says; `statuses` are counted by "METHOD /path" of the document."""

    passed: bool
    report: str
    statuses: dict[str, Counter[int]]


def fuzz(server: str, *, examples: int, seed: int, phases: str = "examples,coverage,fuzzing,stateful") -> Findings:
    """Run it against `server` (host:port), with up to `examples` random requests for each operation."""
    known = {"model": MODEL, "reloaded": RELOADED, "version": "1", "job_id": _submit_job(server)}
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": "schema_hooks",
        "CHARONIA_FUZZED": json.dumps(known),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    # in a directory of its own: it reads settings from where it runs
    with tempfile.TemporaryDirectory() as directory:
        events = Path(directory) / "events.ndjson"
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://{server}/openapi.json"]
        command += ["--checks", ",".join(CHECKS), "--phases", phases, "--seed", str(seed)]
        command += ["--max-examples", str(examples), "--workers", "2", "--request-timeout", "60"]
        command += ["--continue-on-failure", "--suppress-health-check", "all", "--generation-database", "none"]
        command += ["--warnings", "off", "--no-color", "--report-ndjson-path", str(events)]
        done = subprocess.run(
            command, cwd=directory, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return Findings(done.returncode == 0, done.stdout, _statuses(events))


def _submit_job(server: str) -> str:
    """The id of a job that requests can ask for."""
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}
    request = urllib.request.Request(
        f"http://{server}/v2/models/{MODEL}/infer",
        json.dumps({"inputs": [tensor]}).encode(),
        {"prefer": "respond-async"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return str(json.load(reply)["id"])


def _statuses(events: Path) -> dict[str, Counter[int]]:
    found: dict[str, Counter[int]] = {}
    for line in events.read_text().splitlines() if events.exists() else ():
        recorder: dict[str, Any] = json.loads(line).get("ScenarioFinished", {}).get("recorder") or {}
        for interaction in recorder.get("interactions", {}).values():
            status = (interaction.get("response") or {}).get("status_code", 0)
            found.setdefault(recorder["label"], Counter())[status] += 1
    return found


@contextmanager
def fuzzed_server(examples: Path, root: Path) -> Iterator[Any]:
    """A server over the two models, with every endpoint allowed."""
    from e2e_server import serving

    repository = root / "models"
    repository.mkdir()
    for name in (MODEL, RELOADED):
        (repository / name).symlink_to(examples / name)
    flags = ("--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=true", "--allow-webhooks=true")
    with serving(repository, root / "state", *flags) as server:
        yield server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=300, help="random requests for each operation")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "examples")]
    import build_models

    with tempfile.TemporaryDirectory() as root, fuzzed_server(build_models.ensure(), Path(root)) as server:
        findings = fuzz(server.http, examples=options.examples, seed=options.seed)
    print(findings.report)
    for operation, statuses in sorted(findings.statuses.items()):
        print(operation, dict(sorted(statuses.items())))
    return 0 if findings.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
