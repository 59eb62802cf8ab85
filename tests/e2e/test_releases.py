"""A candidate that is slow, and one that errs, are rolled back while clients notice nothing; a good one is released."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_asking import client, inputs, on_the_page, post, until
from e2e_models import python
from e2e_server import serving

MODEL = "adding"
PATH = f"/v2/repository/models/{MODEL}/route"
SOURCE = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        {before}
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() + 1)]
            )
            for request in requests
        ]
"""
# the second is so slow that no call of the first takes as long on a busy machine
VERSIONS = {
    1: "pass",
    2: "time.sleep(1)",
    3: 'raise RuntimeError("the candidate is broken")',
    4: "pass",
}
CONFIG = """
max_batch_size: 8
version_policy { all {} }
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 4 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 4 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
GATE = ["--window=5s", "--min-requests=10"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("releases")
    for version, before in VERSIONS.items():
        python(directory / "models", MODEL, SOURCE.format(before=before), CONFIG, version=version)
    flags = ["--model-control-mode=explicit", f"--load-model={MODEL}"]
    with serving(directory / "models", directory / "state", *flags) as server:
        yield server


def route(server: Any, *words: str) -> Any:
    """What `charonia route MODEL` prints as JSON."""
    command = [str(Path(sys.executable).parent / "charonia"), "route", MODEL, *words, "--json"]
    done = subprocess.run(
        [*command, f"--log-url={server.log_url}"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["routes"][0]


class Clients:
    """Stock clients of both protocols that ask one after the other; `versions` counts who answered."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.versions: Counter[str] = Counter()
        self.failures: list[str] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def ask(self, kind: str) -> None:
        values = np.arange(4, dtype=np.int32)[None]
        with client(kind, self._server) as asking:
            while not self._stop.is_set():
                try:
                    answer = asking.infer(MODEL, inputs(kind, IN=values))
                    wrong = "" if (answer.as_numpy("OUT") == values + 1).all() else "a wrong answer"
                    about = answer.get_response() if kind == "http" else None
                    version = about["model_version"] if about else answer.get_response().model_version
                except Exception as error:
                    wrong, version = repr(error), ""
                with self._lock:
                    self.versions[version] += 1
                    if wrong:
                        self.failures.append(wrong)

    @contextmanager
    def asking(self) -> Iterator[Clients]:
        threads = [threading.Thread(target=self.ask, args=[kind]) for kind in ("http", "grpc")]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()


def rule_of(server: Any) -> Any:
    return json.loads(server.get(PATH)[1])["rule"]


def change(server: Any, **wanted: Any) -> Any:
    """Change the rule over HTTP; the rule that holds."""
    status, answer = post(server, PATH, wanted)
    assert status == 200, answer
    return answer["rule"]


def ended(server: Any) -> Any:
    """The rule once its candidate was judged; what the command has just written may not be known here yet."""
    stages = ("rolled back", "released")
    return until("the candidate is judged", lambda: (rule := rule_of(server))["stage"] in stages and rule)


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_headers_choose_on_both_roads(kind: str, server: Any) -> None:
    """Requests alike in their bytes are recognised by the express lane, but not while a rule chooses their version."""
    values = np.arange(4, dtype=np.int32)[None]

    def version(asking: Any, **more: Any) -> str:
        answer = asking.infer(MODEL, inputs(kind, IN=values), **more).get_response()
        return str(answer["model_version"] if kind == "http" else answer.model_version)

    with client(kind, server) as asking:
        assert {version(asking) for _ in range(20)} == {"4"}, "the highest"
        change(server, present=1, candidate=4, headers={"X-New": "yes"}, gate={"rollback": False})
        try:
            for _ in range(20):
                assert version(asking) == "1"
                assert version(asking, headers={"x-new": "yes"}) == "4"
                assert version(asking, model_version="4") == "4"
        finally:
            assert server.request("DELETE", PATH)[0] == 200
        assert {version(asking) for _ in range(20)} == {"4"}


def test_candidates_are_judged_and_no_call_fails(server: Any) -> None:
    change(server, present=1)
    with Clients(server).asking() as clients:
        until("the present version answers", lambda: clients.versions["1"] > 20)
        route(server, "--canary=2:30%", *GATE)
        slow = ended(server)
        assert clients.versions["2"] > 0
        erring = change(server, candidate=3, share=50, headers={"x-new": "yes"})
        assert (erring["candidate"], erring["stage"]) == (3, "canary")
        erring = ended(server)
        # no latency of a busy machine is above these limits
        gate = {"steps": [100], "max_latency_ratio": 1000, "latency_slack_ms": 100_000, "window_s": 1}
        change(server, candidate=4, share=50, gate=gate)
        good = ended(server)
        until("the new version answers", lambda: clients.versions["4"] > 100)
        change(server, shadow=3)
        until(
            "copies are counted",
            lambda: 'charonia_shadow_requests_total{model="adding",result="failed"}' in server.scrape(),
        )
    assert clients.failures == []
    assert clients.versions["3"] == 0, "what it failed was answered by the present version"
    assert (slow["stage"], slow["present"], slow["share"]) == ("rolled back", 1, 0)
    assert slow["history"][-1]["by"] == "gate"
    assert slow["history"][-1]["reason"].startswith("mean latency ")
    assert erring["stage"] == "rolled back"
    assert erring["history"][-1]["reason"].startswith("100.0% of ")
    assert (good["stage"], good["present"], good["candidate"]) == ("released", 4, 0)

    shown = route(server, "show")
    decisions = [decision["by"] for decision in shown["rule"]["history"]]
    assert decisions[-4:] == ["gate", "operator", "gate", "operator"]
    on_the_page(server, "charonia_release_reruns_total")
    status, answer = server.request("DELETE", PATH)
    assert (status, json.loads(answer)["rule"]) == (200, None)
