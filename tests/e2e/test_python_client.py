"""`charonia.client` and its commands against a running server: answers, jobs, keys, and gateways that die meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from e2e_asking import infer, until
from e2e_models import gated, python, scaling
from e2e_server import Server, serving
from gated_streams import CONFIG, SOURCE, Gates

from charonia.client import AsyncClient, Client, JobNotEnded, RetryPolicy
from charonia.errors import Cancelled, CharoniaError, DeadlineExceeded, InvalidArgument, KeyReused, NotFound

CHARONIA = str(Path(sys.executable).parent / "charonia")
EXAMPLES = ["magika", "magika_features", "silero_vad", "ocr_det", "identity"]
KINDS = ["http", "grpc"]
PATIENT = RetryPolicy(attempts=60, max_pause_s=0.5)
"""Until a gateway is started again, on a machine that is busy."""
ONE = np.ones((1, 1), np.int32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    scaling(repository, "double", 2, config="dynamic_batching { }")
    gated(repository, "gated", "max_batch_size: 1 instance_group [ { count: 1 kind: KIND_CPU } ]")
    python(repository, "squares", SOURCE, CONFIG)
    return repository


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a server's Unix sockets."""
    return tmp_path_factory.mktemp("sockets")


@pytest.fixture(scope="module")
def two(models: Path, sockets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of two gateways, each a process of its own."""
    flags = ["--gateways=2", "--allow-client-shm=true", *(f"--{kind}-socket={sockets}/{kind}.sock" for kind in KINDS)]
    with serving(models, tmp_path_factory.mktemp("two"), *flags) as running:
        yield running


def client(kind: str, server: Server, **options: Any) -> Client:
    return Client(f"{kind}://{getattr(server, kind)}", **options)


def kill_gateways(server: Server) -> None:
    for pid in server.pids("gateway"):
        with suppress(ProcessLookupError):  # one that a test before has killed is listed for a moment longer
            os.kill(pid, signal.SIGKILL)


def row(*numbers: float) -> dict[str, Any]:
    return {"INPUT0": np.array([numbers], np.float32)}


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", EXAMPLES)
def test_answers_are_those_of_tritonclient(kind: str, model: str, server: Server, examples: ModuleType) -> None:
    tensors, sequence = examples.REQUESTS[model](), examples.sequence(model)
    expected = infer(server, model, kind, sequence, **tensors)
    with client(kind, server) as asking:
        if sequence:
            sequence = examples.sequence(model)
        result = asking.infer(model, tensors, parameters=sequence)
    assert result.outputs
    for name, array in result.outputs.items():
        witness = expected.as_numpy(name)
        assert array.dtype == witness.dtype
        np.testing.assert_array_equal(array, witness)


@pytest.mark.parametrize("kind", KINDS)
def test_what_else_a_call_may_say(kind: str, two: Server) -> None:
    with client(kind, two) as asking:
        result = asking.infer(
            "double", row(1, 2, 3, 4), request_id="r", version=1, outputs={"OUTPUT0": 2}, priority=0, timeout_s=30
        )
        assert (result.id, result.model, result.version) == ("r", "double", "1")
        assert result["OUTPUT0"].tolist() == [[b"8.000000:3", b"6.000000:2"]]
        with pytest.raises(NotFound, match="unknown model"):
            asking.infer("nope", row(1))
        with pytest.raises(InvalidArgument, match="data-type is 'FP64'"):
            asking.infer("double", {"INPUT0": [[1.0]]})
        assert asking.live()
        assert asking.ready("double", "1")
        assert not asking.ready("double", "7")
        assert asking.metadata("double")["inputs"][0]["shape"] == [-1, 4]
        assert {model["name"]: model["state"] for model in asking.models()}["squares"] == "READY"
        (statistics,) = asking.statistics("double")
        assert statistics["inference_stats"]["success"]["count"] >= 1


class Held:
    """A request to `gated` that is inside until `open`: what goes with it, and whether it has begun."""

    def __init__(self, directory: Path) -> None:
        self.gate, self.entered = directory / "gate", directory / "entered"
        self.parameters = {"gate": str(self.gate), "entered": str(self.entered)}

    def wait_inside(self) -> None:
        until("the request is executed", self.entered.exists)

    def open(self) -> None:
        self.gate.touch()


@pytest.fixture
def held(two: Server, tmp_path: Path) -> Iterator[Held]:
    made = Held(tmp_path)
    yield made
    made.open()
    # the model may still execute a request that was given up: it has to see the gate before that is removed
    with client("http", two, retry=PATIENT) as asking:
        asking.infer("gated", {"VALUE": ONE})


@pytest.mark.parametrize("kind", KINDS)
def test_a_deadline_ends_a_call_on_time(kind: str, two: Server, held: Held) -> None:
    with client(kind, two) as asking, pytest.raises(DeadlineExceeded):
        asking.infer("gated", {"VALUE": ONE}, parameters=held.parameters, timeout_s=0.5)


# -- shared memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_in_shared_memory(kind: str, two: Server) -> None:
    values = np.arange(40, dtype=np.float32).reshape(10, 4)[:8]
    with client(kind, two) as asking, asking.shared_memory(1024) as region:
        assert (Path("/dev/shm") / region.name).exists()
        taken, given = region.array((8, 4), np.float32), region.array((8, 4), np.float32)
        taken.array[:] = values
        result = asking.infer("double", {"INPUT0": taken}, outputs={"OUTPUT0": given})
        np.testing.assert_array_equal(given.array, 2 * values)
        assert np.shares_memory(result["OUTPUT0"], given.array)
        np.testing.assert_array_equal(result["OUTPUT0"], 2 * values)
        np.testing.assert_array_equal(asking.infer("double", {"INPUT0": taken})["OUTPUT0"], 2 * values)
        np.testing.assert_array_equal(
            asking.infer("double", {"INPUT0": values}, outputs={"OUTPUT0": given})["OUTPUT0"], 2 * values
        )
        for wrong in (lambda: region.array((1024,), np.float32), lambda: region.array((1,), np.object_)):
            with pytest.raises(CharoniaError):
                wrong()
    assert not (Path("/dev/shm") / region.name).exists()
    assert given.array[0, 1] == 2, "the arrays outlive the region"
    with client(kind, two) as asking, pytest.raises(CharoniaError, match="Unable to find shared memory region"):
        asking.infer("double", {"INPUT0": taken})


async def test_shared_memory_for_asyncio_and_of_a_stream(two: Server) -> None:
    async with AsyncClient(f"grpc://{two.grpc}") as asking, asking.shared_memory(256) as region:
        number, given = region.array((1,), np.int32), region.array((1,), np.int32)
        number.array[0] = 3
        stream = asking.stream("squares", {"COUNT": number}, outputs={"VALUE": given}, resume=False)
        assert [int(result["VALUE"][0]) async for result in stream][-1] == 4


def test_a_server_that_allows_no_shared_memory(server: Server) -> None:
    before = set(os.listdir("/dev/shm"))
    refused = pytest.raises(CharoniaError, match="shared memory")
    with client("http", server) as asking, refused, asking.shared_memory(64):
        pass
    assert not {name for name in os.listdir("/dev/shm") if name.startswith("client-")} - before


# -- commands ----------------------------------------------------------------------------------------------------------


class Said:
    def __init__(self, server: Server, *words: str, kind: str = "http") -> None:
        url = f"{kind}://{getattr(server, kind)}"
        done = subprocess.run(
            [CHARONIA, *words], capture_output=True, text=True, env={**os.environ, "CHARONIA_URL": url}
        )
        self.code, self.out, self.error = done.returncode, done.stdout, done.stderr

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_commands_that_ask(kind: str, two: Server, tmp_path: Path) -> None:
    assert "ready (triton" in Said(two, "health", kind=kind).out
    assert Said(two, "health", "nope", kind=kind).code == 1
    assert {row["name"] for row in Said(two, "models", "--json", kind=kind).lines[0]} == {"double", "gated", "squares"}
    table = Said(two, "models", kind=kind).out.splitlines()
    assert [line.split() for line in table if line.startswith("squares")] == [["squares", "1", "READY", "-"]]
    said = Said(two, "infer", "squares", "--input", "COUNT=3", kind=kind)
    assert said.code == 1
    assert said.error.rstrip().endswith("doesn't support models with decoupled transaction policy: add --stream")
    said = Said(two, "infer", "double", "--input", "INPUT0=[1, 2, 3, 4]", kind=kind)
    assert said.out.splitlines() == ["OUTPUT0 FP32 [1, 4]", "[[2. 4. 6. 8.]]"]
    said = Said(two, "infer", "double", "--input", "INPUT0=[1, 2, 3, 4]", "--out", str(tmp_path), kind=kind)
    assert np.load(said.out.strip()).tolist() == [[2, 4, 6, 8]]
    said = Said(two, "infer", "squares", "--input", "COUNT=3", "--stream", "--json", kind=kind)
    assert [line["outputs"][0]["data"] for line in said.lines] == [[0], [1], [4]]
    said = Said(two, "infer", "squares", "--input", "COUNT=0", "--parameter", "ends=bare", "--stream", kind=kind)
    assert said.out == "(without outputs)\n"
    assert Said(two, "stats", "double", "--json", kind=kind).lines[0][0]["inference_count"] > 0
    assert "QUEUE US" in Said(two, "stats", kind=kind).out
    said = Said(two, "infer", "double", "--input", "INPUT0=[1]", kind=kind)
    assert (said.code, said.out) == (1, "")
    assert said.error.startswith("charonia: input 'INPUT0' of shape [-1, 4] cannot be '[1]'")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("two")
def test_commands_ask_over_a_unix_socket(kind: str, sockets: Path) -> None:
    url = f"{kind}+unix://{sockets}/{kind}.sock"

    def said(*words: str) -> str:
        return subprocess.run(
            [CHARONIA, *words, "--url", url], capture_output=True, text=True, check=True, timeout=60
        ).stdout

    assert "ready (triton" in said("health")
    assert "squares" in said("models")
    assert said("infer", "double", "--input", "INPUT0=[1, 2, 3, 4]").splitlines()[-1] == "[[2. 4. 6. 8.]]"
    found = json.loads(said("bench", "-m", "double", "--request-count", "20", "--concurrency-range", "2", "--json"))
    assert found["url"] == url
    assert found["levels"][0]["requests"] >= 20
    assert found["levels"][0]["errors"] == {}


def test_commands_about_jobs(two: Server) -> None:
    job = Said(two, "submit", "squares", "--input", "COUNT=2", "--key", "from-the-shell").out.strip()
    assert Said(two, "submit", "squares", "--input", "COUNT=2", "--key", "from-the-shell").out.strip() == job
    # who follows a job that runs may hear of an event after responses that were written later
    until("it has ended", lambda: json.loads(two.get(f"/v2/jobs/{job}")[1])["state"] == "succeeded")
    events = Said(two, "tail", job, "--json").lines
    assert [event["event"] for event in events] == ["accepted", "batched", *["response"] * 3, "succeeded"]
    assert [event["response"]["outputs"][0]["data"] for event in events[2:4]] == [[0], [1]]
    assert Said(two, "tail", job).out.splitlines()[4].endswith("(the last)")
    rest = Said(two, "tail", job, "--json", "--after", events[3]["place"]).lines
    assert rest == events[4:]
    assert [line["outputs"][0]["data"] for line in Said(two, "result", job, "--json").lines] == [[0], [1]]
    said = Said(two, "result", "nothing")
    assert (said.code, said.error) == (1, "charonia: job not found\n")


# -- executed once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_with_a_key_is_executed_once_though_its_gateway_dies(kind: str, two: Server, held: Held) -> None:
    key = f"order-{kind}"
    with client(kind, two, retry=PATIENT) as asking, ThreadPoolExecutor(1) as pool:
        before = int(asking.infer("gated", {"VALUE": ONE})["EXECUTION"][0, 0])
        call = pool.submit(asking.infer, "gated", {"VALUE": 7 * ONE}, parameters=held.parameters, idempotency_key=key)
        held.wait_inside()
        kill_gateways(two)
        held.open()
        result = call.result(60)
        again = asking.infer("gated", {"VALUE": 7 * ONE}, parameters=held.parameters, idempotency_key=key)
        assert result["ECHO"].tolist() == again["ECHO"].tolist() == [[7]]
        assert result["EXECUTION"] == again["EXECUTION"] == before + 1
        with pytest.raises(KeyReused):
            asking.infer("gated", {"VALUE": 8 * ONE}, parameters=held.parameters, idempotency_key=key)
        assert asking.infer("gated", {"VALUE": ONE})["EXECUTION"] == before + 2


@pytest.mark.parametrize("kind", KINDS)
def test_jobs(kind: str, two: Server, held: Held) -> None:
    with client(kind, two) as asking:
        job = asking.submit("gated", {"VALUE": 3 * ONE}, parameters=held.parameters)
        assert job.receipt is not None
        assert job.receipt.state in ("queued", "running")
        held.wait_inside()
        with pytest.raises(JobNotEnded) as waiting:
            job.result(0.05)
        assert waiting.value.status.state == "running"
        held.open()
        assert job.result(60)["ECHO"].tolist() == [[3]]
        assert asking.job(job.id).result()["ECHO"].tolist() == [[3]]
        with pytest.raises(NotFound, match="job not found"):
            asking.job("0" * 32 + ".gated").result()


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_is_cancelled_raises_for_its_readers(kind: str, two: Server, held: Held) -> None:
    with client(kind, two) as asking:
        job = asking.submit("gated", {"VALUE": ONE}, parameters=held.parameters)
        held.wait_inside()
        assert job.cancel().state == "cancelled"
        with pytest.raises(Cancelled):
            job.result()
    with client("http", two) as asking:
        assert asking.job(job.id).status().state == "cancelled"


def test_the_events_of_a_job_go_on_after_its_gateway_died(two: Server, held: Held) -> None:
    with client("http", two, retry=PATIENT) as asking:
        job = asking.submit("gated", {"VALUE": ONE}, parameters=held.parameters)
        events = job.events()
        seen = [next(events), next(events)]
        kill_gateways(two)
        held.open()
        seen += events
    assert [event.kind for event in seen] == ["accepted", "batched", "succeeded"]
    assert [event.number for event in seen] == [1, 2, 3]
    with client("http", two, retry=PATIENT) as asking:
        assert [event.kind for event in asking.job(job.id).events(seen[1].place)] == ["succeeded"]
        assert list(asking.job(job.id).events(seen[2].place)) == []


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path)


def count(number: int) -> dict[str, Any]:
    return {"COUNT": np.array([number], np.int32)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_goes_on_after_its_gateway_died(kind: str, two: Server, gates: Gates) -> None:
    """Each response once and in order, and the model runs once."""
    with client(kind, two, retry=PATIENT) as asking:
        stream = asking.stream("squares", count(5), parameters=gates.parameters)
        gates.open(0, 1)
        seen = [int(next(stream)["VALUE"][0]) for _ in range(2)]
        kill_gateways(two)
        gates.open(2, 3, 4)
        seen += [int(result["VALUE"][0]) for result in stream]
        assert seen == [0, 1, 4, 9, 16]
        assert not gates.left.exists()


async def test_an_asynchronous_stream_goes_on_too(two: Server, gates: Gates) -> None:
    for kind in KINDS:
        async with AsyncClient(f"{kind}://{getattr(two, kind)}", retry=PATIENT) as asking:
            stream = asking.stream("squares", count(3), parameters=gates.parameters)
            gates.open(0)
            seen = [int((await anext(stream))["VALUE"][0])]
            kill_gateways(two)
            gates.open(1, 2)
            seen += [int(result["VALUE"][0]) async for result in stream]
            assert seen == [0, 1, 4]
            job = await asking.submit("squares", count(2))
            assert [int(result["VALUE"][0]) async for result in job.responses()] == [0, 1]


@pytest.mark.parametrize("resume", [None, False])
@pytest.mark.parametrize("kind", KINDS)
def test_leaving_a_stream_cancels_its_request(kind: str, resume: bool | None, two: Server, gates: Gates) -> None:
    if kind == "http" and resume is False:
        kind = "grpc"  # a plain stream is gRPC's alone
    with client(kind, two, retry=PATIENT) as asking:
        stream = asking.stream("squares", count(3), parameters=gates.parameters, resume=resume)
        gates.open(0)
        next(stream)
        stream.close()
        until("the model has noticed", gates.left.exists)


ENDS = {
    "the flag alone": (2, {}),
    "the flag alone, after nothing": (0, {}),
    "a response with outputs": (2, {"flagged": True}),
    "a response without outputs": (2, {"ends": "bare"}),
    "a response without outputs, after nothing": (0, {"ends": "bare"}),
    "a response without outputs before the flag": (2, {"bare_at": 1}),
}


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("wanted", [True, False])
def test_the_end_of_a_stream_is_what_tritonclient_shows(ends: str, wanted: bool, two: Server) -> None:
    number, parameters = ENDS[ends]
    expected = [
        (None if response.as_numpy("VALUE") is None else int(response.as_numpy("VALUE")[0]), final)
        for response, final in streamed(two, number, parameters, wanted)
    ]
    assert len(expected) == number + (not parameters and wanted) + (parameters.get("ends") == "bare") + (
        "bare_at" in parameters and wanted
    )
    asked = {**parameters, "triton_enable_empty_final_response": wanted}
    for kind, resume in (("http", None), ("grpc", None), ("grpc", False)):
        with client(kind, two, retry=PATIENT) as asking:
            found = list(asking.stream("squares", count(number), parameters=asked, resume=resume))
        shown = [(int(r["VALUE"][0]) if r.tensors else None, r.parameters["triton_final_response"]) for r in found]
        assert shown == expected, (kind, resume)
        assert {result.model for result in found} <= {"squares"}


def streamed(
    server: Server, number: int, parameters: dict[str, Any], wanted: bool
) -> list[tuple[triton.InferResult, bool]]:
    """What the stock client gets of a stream, with what each response says of being the last one."""
    answers: list[Any] = []
    with triton.InferenceServerClient(server.grpc) as asking:
        asking.start_stream(lambda result, error: answers.append(error or result))
        tensor = triton.InferInput("COUNT", [1], "INT32")
        tensor.set_data_from_numpy(count(number)["COUNT"])
        more = {"parameters": parameters} if parameters else {}
        asking.async_stream_infer("squares", [tensor], enable_empty_final_response=wanted, **more)
        asking.stop_stream()  # waits for all responses
    return [(one, one.get_response().parameters["triton_final_response"].bool_param) for one in answers]


def test_the_responses_of_a_job_have_its_last_one_without_outputs(two: Server) -> None:
    for kind in KINDS:
        with client(kind, two, retry=PATIENT) as asking:
            for ends, more in (("bare", 1), ("", 0)):
                job = asking.submit("squares", count(2), parameters={"ends": ends})
                found = [list(result.tensors) for result in job.responses()]
                assert found == [["VALUE"]] * 2 + [[]] * more, kind
                if kind == "http":
                    assert [list(result.tensors) for result in job.results()] == found
                    told = [event for event in job.events() if event.kind == "response"]
                    assert (told[-1].final, told[-1].response is None) == (True, not more)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_response_is_raised_behind_those_before_it(kind: str, two: Server) -> None:
    with client(kind, two, retry=PATIENT) as asking:
        stream = asking.stream("squares", count(4), parameters={"fail_at": 2})
        assert [int(next(stream)["VALUE"][0]) for _ in range(2)] == [0, 1]
        with pytest.raises(CharoniaError, match="An Error Occurred"):
            next(stream)
        assert [r["OUTPUT0"].tolist() for r in asking.stream("double", row(1, 2, 3, 4))] == [[[2, 4, 6, 8]]]
        assert list(asking.stream("squares", count(0))) == []
