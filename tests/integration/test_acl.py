"""The users of `infra/redis/users.acl.template`: each role works as its own user and is refused what it must not do."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import log_servers as servers
import pytest
import role_processes as roles
from fragile_models import FRAGILE, TWICE, fragile_model
from guarded_server import GuardedServer

from charonia.eventlog.port import Limits
from charonia.eventlog.redis import RedisLog
from charonia.facts.jobs import NewJob
from loadtest.stack.models import FEATURES, numbers, write_features

pytestmark = pytest.mark.integration

_CACHE = "--cache-config=local,size=1000000"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GuardedServer]:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    server = GuardedServer(secrets)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def house(request: pytest.FixtureRequest, server: GuardedServer, tmp_path: Path) -> Iterator[Any]:
    """Every role as a process with its own user, the password in a file."""
    models = roles.held_model(tmp_path / "models")
    write_features(models)
    fragile_model(models, "fragile")
    (models / "twice" / "1").mkdir(parents=True)
    (models / "twice" / "config.pbtxt").write_text(TWICE)
    with ExitStack() as stack:

        def start(role: str, *flags: str) -> Any:
            password = tmp_path / "secrets" / f"redis_{role}"
            url = f"redis://{role}@127.0.0.1:{server.port}/0"
            process = roles.Role(
                role, tmp_path, f"--log-url={url}", f"--log-password-file={password}", "--log-verbose=0", *flags
            )
            stack.callback(lambda: process.process.poll() is None and process.kill())
            return process

        def executor(*flags: str) -> Any:
            return start("executor", f"--model-repository={models}", _CACHE, *flags)

        secrets = tmp_path / "webhook-secrets.toml"
        secrets.write_text('default = ["whsec_QUJDQUJDQUJDQUJDQUJDQUJDQUJDQUJD"]\n')
        allow = "--webhook-allow=127.0.0.0/8"
        parts = SimpleNamespace(
            gateway=start("gateway", "--durability=fsync", "--journal=all", allow, _CACHE),
            batcher=start("batcher", _CACHE),
            executor=executor(*getattr(request, "param", ())),
            webhooks=start("webhooks", f"--webhook-secrets={secrets}", allow),
        )
        for part in vars(parts).values():
            part.until_up()
        parts.start = start
        parts.new_executor = executor
        parts.new_batcher = lambda: start("batcher")
        try:
            for model in ("held", "fragile", "asks_fragile", "calls_fragile", *FEATURES):
                parts.gateway.until_serves(model)
            yield parts
        finally:
            for part in (parts.gateway, parts.batcher, parts.executor, parts.webhooks):
                sys.stderr.write(f"--- {part.role}\n{part.log()}\n")
            sys.stderr.write(f"--- refused by the server: {server.refusals()}\n")


@pytest.fixture
def endpoint() -> Iterator[Any]:
    """Takes one webhook."""
    called = Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(204)
            self.end_headers()
            called.set()

        def log_message(self, *_: Any) -> None:
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=listening.serve_forever)
    thread.start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{listening.server_port}/", called=called)
    listening.shutdown()
    listening.server_close()
    thread.join()


_X_AND_Y = {
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [1]}],
}


class Operator:
    """`charonia <words> --json` as the log's operator."""

    def __init__(self, server: GuardedServer, directory: Path) -> None:
        self._environment = {
            **os.environ,
            "CHARONIA_LOG_URL": f"redis://operator@127.0.0.1:{server.port}/0",
            "CHARONIA_LOG_PASSWORD_FILE": str(directory / "secrets" / "redis_operator"),
        }

    def __call__(self, *words: str) -> Any:
        words = (roles.CHARONIA, *words, "--json")
        done = subprocess.run(words, capture_output=True, text=True, env=self._environment, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def unexpected(server: GuardedServer) -> set[str]:
    """What the server refused, but for what all ask as they connect and only who promises `fsync` needs."""
    return {refusal for refusal in server.refusals() if not refusal.endswith("command config|get")}


class Sequence:
    """A sequence of the model `sums`, whose state the executor keeps in the log."""

    def __init__(self, gateway: Any, name: str) -> None:
        self._gateway, self._name, self._sum = gateway, name, 0.0

    def step(self, **marks: bool) -> None:
        self._sum += 3.0
        body = numbers("X", [1, 1], [3.0]) | {"parameters": {"sequence_id": self._name, **marks}}
        status, answer = self._gateway.ask("POST", "/v2/models/sums/infer", json.dumps(body).encode())
        assert (status, answer.get("outputs", [{}])[0].get("data")) == (200, [self._sum]), answer


def every_feature_works(gateway: Any) -> None:
    """A model that calls models, an ensemble of it, responses one by one to a caller and to a job, answers as jobs."""
    for count, told in (("5", "5"), (None, "-1")):  # counted in the log
        status, answer = gateway.ask("POST", "/v2/trace/setting", json.dumps({"trace_count": count}).encode())
        assert (status, answer["trace_count"]) == (200, told)
    four = json.dumps(numbers("X", [4], [1.0, 2.0, 3.0, 4.0])).encode()
    for model, factor in (("calls", 4.0), ("pipeline", 8.0)):
        expected = [factor, 2 * factor, 3 * factor, 4 * factor]
        for headers in ({}, {"Idempotency_Key": f"{model} once"}):
            status, answer = gateway.ask("POST", f"/v2/models/{model}/infer", four, **headers)
            assert (status, answer.get("outputs", [{}])[0].get("data")) == (200, expected), answer
    five = json.dumps(numbers("N", [1], [5], "INT32")).encode()
    status, job = gateway.ask("POST", "/v2/models/counts/infer", five, Prefer="respond-async")
    assert status == 202
    status, answers = gateway.ask("GET", f"/v2/jobs/{job['id']}/result?wait=30")
    assert (status, [one["outputs"][0]["data"] for one in answers]) == (200, [[0], [1], [2], [3], [4]])
    text = gateway.read("/v2/models/counts/generate_stream", b'{"N": 3}')
    assert [json.loads(line[5:])["OUT"] for line in text.splitlines() if line.startswith("data:")] == [0, 1, 2]


def test_every_role_does_its_work_as_its_own_user(
    server: GuardedServer, house: Any, endpoint: Any, tmp_path: Path
) -> None:
    gateway = house.gateway
    # over 32 KB: beside the log, as no directory is shared
    for values in ([1.0, 2.0], [float(n) for n in range(20_000)]):
        status, answer = gateway.ask("POST", "/v2/models/held/infer", roles.request(values))
        assert (status, answer["outputs"][0]["data"]) == (200, values)
        # and an ensemble, whose steps are requests of its batcher
        status, answer = gateway.ask("POST", "/v2/models/twice/infer", roles.request(values))
        assert (status, answer["outputs"][0]["data"]) == (200, values)
    every_feature_works(gateway)
    sequence = Sequence(gateway, "long")
    sequence.step(sequence_start=True)
    # a job with a key and a webhook, under fsync
    headers = {"Idempotency_Key": "k", "Charonia_Webhook": endpoint.url}
    job = gateway.submit(roles.request([3.0]), **headers)
    gateway.until_state(job, "succeeded")
    assert gateway.submit(roles.request([3.0]), **headers) == job
    assert endpoint.called.wait(roles.PATIENCE_S)
    roles.until(
        "its delivery is told", lambda: gateway.until_state(job, "succeeded")["webhook"]["state"] == "delivered"
    )

    # one that runs, one that waits and is cancelled, while the executor is killed
    gate, entered = tmp_path / "gate", tmp_path / "entered"
    running = gateway.submit(roles.request([4.0], gate=str(gate), entered=str(entered)))
    roles.until("it runs", entered.exists)
    waiting = gateway.submit(roles.request([5.0]))
    assert gateway.ask("DELETE", f"/v2/jobs/{waiting}")[0] in (200, 202)
    gateway.until_state(waiting, "cancelled")
    entered.unlink()
    house.executor.kill()
    executor = house.new_executor()
    executor.until_up()
    roles.until("it runs again", entered.exists)
    # and a batcher that takes over from a killed one
    house.batcher.kill()
    batcher = house.new_batcher()
    batcher.until_up()
    gate.touch()
    assert gateway.until_state(running, "succeeded")["attempts"] >= 2
    status, _ = gateway.ask("POST", "/v2/models/held/infer", roles.request([6.0]))
    assert status == 200
    # the successors have the sequence's state from the log
    sequence.step()
    sequence.step(sequence_end=True)
    every_feature_works(gateway)

    operate = Operator(server, tmp_path)
    assert operate("audit")["findings"] == []
    assert len(operate("jobs", "ls", "--model=held")["jobs"]) == 3
    operate("queue", "pause", "held")
    held = gateway.submit(roles.request([7.0]))
    assert operate("queue", "ls")["queues"][0]["requests"] == 1
    operate("jobs", "cancel", held)
    gateway.until_state(held, "cancelled")
    operate("queue", "resume", "held")
    operate("dlq", "ls")
    for part in (gateway, batcher, executor, house.webhooks):
        assert part.stop() == 0, part.log()
    assert unexpected(server) == set()


@pytest.mark.parametrize("house", [("--max-loaded-models=3",)], indirect=True)
@pytest.mark.long
def test_models_come_and_go_and_operators_mend_as_their_own_users(
    server: GuardedServer, house: Any, tmp_path: Path
) -> None:
    """Models on demand, cached responses, adaptive batching, dead letters, and a model that is loaded with files."""
    gateway, operate = house.gateway, Operator(server, tmp_path)
    every_feature_works(gateway)
    Sequence(gateway, "short").step(sequence_start=True, sequence_end=True)
    for model, value in (("fragile", 2.0), ("asks_fragile", 3.0), ("calls_fragile", 4.0)):
        for _ in range(2):  # the second time from the cache
            body = json.dumps(numbers("X", [1, 1], [value])).encode()
            status, answer = gateway.ask("POST", f"/v2/models/{model}/infer", body)
            assert (status, answer["outputs"][0]["data"]) == (200, [value])
    roles.until("what adapts is told", lambda: operate("queue", "inspect", "fragile")["adaptive"])

    poison = json.dumps(numbers("X", [1, 1], [13.0])).encode()
    status, answer = gateway.ask("POST", "/v2/models/fragile/infer", poison)
    assert status == 500, answer
    (letter,) = operate("dlq", "ls")["letters"]
    operate("dlq", "show", "fragile", letter["id"])
    operate("dlq", "replay", "fragile", letter["id"])
    roles.until("it died again", lambda: operate("jobs", "ls", "--model=fragile", "--state=failed")["jobs"])
    operate("dlq", "drop", "fragile", "--all")
    assert operate("dlq", "ls")["letters"] == []

    operate("queue", "pause", "held")
    waiting = gateway.submit(roles.request([7.0]))
    (row,) = operate("queue", "inspect", "held")["queue"]
    operate("queue", "cancel", "held", "--id", row["id"])
    gateway.until_state(waiting, "cancelled")
    operate("queue", "resume", "held")
    (one,) = operate("executors", "ls")["executors"]
    assert one["state"] == "ready"

    assert house.executor.stop() == 0, house.executor.log()  # models that come by themselves are not loaded by request
    spare = tmp_path / "spare"
    fragile_model(spare, "spare")
    other = house.start("executor", f"--model-repository={spare}", "--model-control-mode=explicit", "--pool=other")
    other.until_up()
    content = base64.b64encode(FRAGILE.replace("tensor)])", "2 * tensor)])").encode()).decode()
    files = {"config": json.dumps({"backend": "python", "max_batch_size": 8} | _X_AND_Y), "file:1/model.py": content}
    status, answer = gateway.ask("POST", "/v2/repository/models/spare/load", json.dumps({"parameters": files}).encode())
    assert status == 200, answer
    status, answer = gateway.ask("POST", "/v2/models/spare/infer", json.dumps(numbers("X", [1, 1], [2.0])).encode())
    assert (status, answer["outputs"][0]["data"]) == (200, [4.0])
    assert gateway.ask("POST", "/v2/repository/models/spare/unload")[0] == 200
    for part in (gateway, house.batcher, other, house.webhooks):
        assert part.stop() == 0, part.log()
    assert unexpected(server) == set()


async def test_what_roles_wrote_is_there_again_after_a_restart(server: GuardedServer) -> None:
    """The append-only file is read back as the user `default`, who can do nothing else."""
    job = NewJob(b"j" * 16, 1, 1, 600)
    log = RedisLog(f"redis://gateway:gateway's%3Apassword@127.0.0.1:{server.port}", durability="fsync")
    await log.open()
    await log.accept_job("m", 0, 0, job, [b"r", job.id], Limits())
    await log.close()
    server.kill()
    server.start()
    await log.open()
    assert await log.job("m", job.id) is not None
    assert await log.pending("m") == (1, 1)
    await log.close()


async def test_a_gateway_writes_down_what_level_a_job_has_reached(server: GuardedServer) -> None:
    """A level that is reached after the job is in the log is written by a second command."""
    replica = servers.LogServer(
        replicaof=f"127.0.0.1 {server.port}", masteruser="watcher", masterauth="watcher", appendonly="no"
    )
    replica.start()
    log = RedisLog(f"redis://gateway:gateway's%3Apassword@127.0.0.1:{server.port}", durability="memory")
    await log.open()
    try:
        with server.client() as watcher:
            roles.until("the replica follows", lambda: watcher.execute_command("WAIT", 1, 100) == 1)
        job = NewJob(b"r" * 16, 1, 1, 600)
        ticket = await log.accept_job("m", 0, 0, job, [b"r", job.id], Limits(), durability="replicated:1")
        assert ticket.durability == "replicated:1"
        view = await log.job("m", job.id)
        assert view is not None
        assert view.durability == "replicated:1"
    finally:
        await log.close()
        replica.stop()
