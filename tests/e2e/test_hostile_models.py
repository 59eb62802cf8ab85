"""Hostile native models through `serve`: what they try is refused or ends their process; no other request is lost."""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import plugin_backends as acts
import pytest
from e2e_asking import index, infer, until
from e2e_server import Server, serving
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.long

SECRET = b"the key to everything"

HOSTILE = """
backend: "hostile" max_batch_size: 8
input { name: "act" data_type: TYPE_INT32 dims: 1 } output { name: "error" data_type: TYPE_INT32 dims: 1 }
instance_group { count: 2 kind: KIND_CPU }
parameters [
  { key: "file" value { string_value: "FILE" } }, { key: "port" value { string_value: "PORT" } },
  { key: "charonia.max_execution_s" value { string_value: "4" } } MORE
]
"""
UNRESTRICTED = ', { key: "charonia.isolation" value { string_value: "process" } }'
DOUBLES = """
backend: "shapes" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 } output { name: "y" data_type: TYPE_FP32 dims: -1 }
instance_group { count: 1 kind: KIND_CPU }
parameters [
  { key: "shape" value { string_value: "batch" } }, { key: "charonia.isolation" value { string_value: "ISOLATION" } }
]
"""


class Listener:
    """A port that somebody might connect or send to, and whether anybody did."""

    def __init__(self) -> None:
        self.stream = socket.create_server(("127.0.0.1", 0))
        self.port = self.stream.getsockname()[1]
        self.datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.datagrams.bind(("127.0.0.1", self.port))
        for one in (self.stream, self.datagrams):
            one.setblocking(False)

    def was_reached(self) -> bool:
        for reach in (lambda: self.stream.accept()[0].close(), lambda: self.datagrams.recv(1)):
            try:
                reach()
            except BlockingIOError:
                continue
            return True
        return False

    def close(self) -> None:
        self.stream.close()
        self.datagrams.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


class Bystander:
    """Asks other models all the while, and counts their answers."""

    def __init__(self, server: Server, *models: str) -> None:
        self.answers = dict.fromkeys(models, 0)
        self.failures: list[str] = []
        self._server = server
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(model,)) for model in models]

    def __enter__(self) -> Bystander:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, model: str) -> None:
        while not self._over.is_set():
            try:
                found = infer(self._server, model, x=np.full((1, 4), 3, np.float32)).as_numpy("y")
                assert (found == 6).all()
            except Exception as error:
                self.failures.append(f"{model}: {error}")
            self.answers[model] += 1


def written(repository: Path, name: str, config: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)


def ask(server: Server, model: str, act: int) -> int:
    return int(infer(server, model, act=np.array([[act]], np.int32)).as_numpy("error")[0, 0])


def runs(pid: int) -> bool:
    """Whether it is a process of the bomb, which has not ended: one of its model's command, or of its own."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"isolation.child" in command or command.split(b"\0")[:-1] == [word.encode() for word in acts.SLEEP]


def test_a_hostile_model_harms_nobody(tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(acts.install(tmp_path / "site")), prepend=":")
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    models = tmp_path / "models"
    hostile = HOSTILE.replace("FILE", str(secret)).replace("PORT", str(listener.port))
    written(models, "hostile", hostile.replace("MORE", ""))
    written(models, "unrestricted", hostile.replace("MORE", UNRESTRICTED))
    own = models / "reads_itself" / "config.pbtxt"
    written(models, "reads_itself", hostile.replace(str(secret), str(own)).replace("MORE", ""))
    written(models, "within", DOUBLES.replace("ISOLATION", "none"))
    written(models, "beside", DOUBLES.replace("ISOLATION", "process"))
    with serving(models, tmp_path / "state") as server:
        assert isolation(server, "hostile") == "sandbox"
        assert isolation(server, "unrestricted") == "process"
        assert isolation(server, "within") == "none"
        before = [one for one in server.processes() if "parent" not in one]
        with Bystander(server, "within", "beside") as others:
            refused = (acts.READ, acts.WRITE, acts.CONNECT, acts.DATAGRAM, acts.FORK, acts.SPAWN, acts.ENVIRONMENT)
            assert {act: ask(server, "hostile", act) for act in refused} == dict.fromkeys(refused, errno.EACCES)
            assert ask(server, "hostile", acts.BOMB) == 0, "no way leads to another process"
            assert ask(server, "hostile", acts.SIGNAL) == errno.EPERM
            assert ask(server, "hostile", acts.THREADS) == 0
            assert ask(server, "reads_itself", acts.READ) == 0
            assert ask(server, "reads_itself", acts.WRITE) == errno.EACCES
            assert not listener.was_reached()
            assert ask(server, "unrestricted", acts.BOMB) == acts.BOMB_SIZE, "it may have processes, but"
            bomb = [int(pid) for pid in Path(f"{secret}.pids").read_text().split()]
            assert len([pid for pid in bomb if runs(pid)]) == acts.BOMB_SIZE
            for model in ("hostile", "unrestricted"):
                for act in (acts.SEGFAULT, acts.HANG):
                    with pytest.raises(InferenceServerException, match="is not healthy"):
                        ask(server, model, act)
                    assert ask(server, model, acts.ECHO) == 0, "another process runs it"
            until("the end of the bomb, with its model's process", lambda: not any(map(runs, bomb)))
            assert ask(server, "unrestricted", acts.READ) == 0, "what the sandbox is for"
            assert ask(server, "unrestricted", acts.CONNECT) == 0
            assert listener.was_reached()
            seen = dict(others.answers)
            until("answers of the others", lambda: all(others.answers[model] > count for model, count in seen.items()))
        assert others.failures == []
        assert min(others.answers.values()) > 1
        assert [one for one in before if one not in server.processes()] == [], "no part of the server has ended"
        assert {row["state"] for row in index(server).values()} == {"READY"}


def isolation(server: Server, model: str) -> Any:
    _, body = server.get(f"/v2/models/{model}/config")
    return json.loads(body)["parameters"]["charonia.isolation"]["string_value"]
