"""Roles as processes over a log server of a test's choice, and a small model to send work to. Stopped by pid only."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
CHARONIA = str(Path(sys.executable).parent / "charonia")
PATIENCE_S = 60.0

HELD = '''
import json, os, time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """IN -> OUT. Parameter `gate`: a file to wait for; `entered`: a file to make before."""

    def execute(self, requests):
        responses = []
        for request in requests:
            said = json.loads(request.parameters())
            if "entered" in said:
                open(said["entered"], "w").close()
            while "gate" in said and not os.path.exists(said["gate"]):
                time.sleep(0.002)
            tensor = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor)]))
        return responses
'''
_CONFIG = """
backend: "python"
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ count: 1 kind: KIND_CPU }]
"""


def until(what: str, look: Callable[[], T]) -> T:
    """Poll what another process makes true."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not (seen := look()):
        assert time.monotonic() < give_up_at, f"it did not come true: {what}"
        time.sleep(0.02)
    return seen


def held_model(repository: Path) -> Path:
    """A repository with the model `held`."""
    version = repository / "held" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(HELD)
    (version.parent / "config.pbtxt").write_text(_CONFIG)
    return repository


def request(values: list[float], **parameters: str) -> bytes:
    tensor = {"name": "IN", "shape": [len(values)], "datatype": "FP32", "data": values}
    return json.dumps({"inputs": [tensor], "parameters": parameters}).encode()


class Role:
    """One process of a role; a gateway knows its address once it is up."""

    def __init__(self, role: str, directory: Path, *flags: str) -> None:
        self.role = role
        self._log = directory / f"{role}-{time.monotonic_ns()}.log"
        words = [CHARONIA, role, "--metrics-port=0", "--metrics-address=127.0.0.1", *flags]
        if role == "gateway":
            words += ["--http-port=0", "--http-address=127.0.0.1", "--allow-grpc=false"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def log(self) -> str:
        return self._log.read_text()

    def until_up(self) -> None:
        def says() -> re.Match[str] | None:
            assert self.process.poll() is None, self.log()
            return re.search(rf"{self.role} is up(?:, http on ([\d.:]+))?", self.log())

        found = until(f"{self.role} is up", says)
        assert found is not None
        self.http = found[1] or ""

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
        """Status and decoded body of one exchange; names of headers have _ for -."""
        status, data = self._exchange(method, path, body, headers)
        return status, json.loads(data) if data else None

    def read(self, path: str, body: bytes) -> str:
        """The text of what is answered to a POST, once its end has come."""
        status, data = self._exchange("POST", path, body, {})
        assert status == 200, data
        return data.decode()

    def _exchange(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.http, timeout=90)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def until_serves(self, model: str) -> None:
        until(f"{model} is ready", lambda: self.ask("GET", f"/v2/models/{model}/ready")[0] == 200)

    def submit(self, body: bytes, **headers: str) -> str:
        """A job of model `held`; its id."""
        status, view = self.ask("POST", "/v2/models/held/infer", body, Prefer="respond-async", **headers)
        assert status == 202, view
        return str(view["id"])

    def until_state(self, job: str, state: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            status, view = self.ask("GET", f"/v2/jobs/{job}")
            if status == 503:  # its log is away for a moment
                return None
            assert status == 200, view
            return dict(view) if view["state"] == state else None

        found = until(f"{job} is {state}", look)
        assert found is not None
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
