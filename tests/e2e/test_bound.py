"""Functions of a program served from its own process (P21): the example as a user runs it, and servers in this one."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_asking import until
from tritonclient import grpc, http
from tritonclient.utils import InferenceServerException

import charonia
from charonia import Server, TensorSpec
from charonia.errors import InvalidArgument, NotFound, StartupError

REPOSITORY = Path(__file__).resolve().parents[2]
FREE: Any = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
X = [TensorSpec("X", np.int32, [-1])]
Y = [TensorSpec("Y", np.int32, [-1])]


def ask(server: Any, model: str, value: Any, kind: str = "http", **more: Any) -> Any:
    module = http if kind == "http" else grpc
    array = np.asarray(value, np.int32)
    tensor = module.InferInput("X", array.shape, "INT32")
    tensor.set_data_from_numpy(array)
    with module.InferenceServerClient(getattr(server, kind)) as client:
        return client.infer(model, [tensor], **more).as_numpy("Y")


def test_the_example_as_a_user_runs_it() -> None:
    command = [sys.executable, "examples/bound.py", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        # who runs the tests in the background of a script ignores Ctrl-C, and so would this
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"HTTP on (\S+), gRPC on (\S+), metrics on (\S+)\n", line)
        assert found, line
        with http.InferenceServerClient(found[1]) as client:
            vectors = http.InferInput("VECTORS", [2, 2], "FP32")
            vectors.set_data_from_numpy(np.array([[3, 4], [0, 5]], np.float32))
            answer = client.infer("normalise", [vectors])
            assert np.allclose(answer.as_numpy("UNIT"), [[0.6, 0.8], [0, 1]])
            assert answer.as_numpy("LENGTH").tolist() == [[5], [5]]
            vectors.set_data_from_numpy(np.zeros((2, 2), np.float32))
            with pytest.raises(InferenceServerException, match="a vector of length 0 has no direction") as caught:
                client.infer("normalise", [vectors])
            assert caught.value.status() == "400"
        with grpc.InferenceServerClient(found[2]) as client:
            for seen in (1, 2):
                words = grpc.InferInput("WORDS", [1], "BYTES")
                words.set_data_from_numpy(np.array([b"turn"], dtype=object))
                assert client.infer("count", [words]).as_numpy("SEEN").tolist() == [seen]
        children = until(
            "a gateway, a log, and a process for the heartbeats of each part",
            lambda: len(found := descendants(process.pid)) >= 4 and found,
        )
        # as Ctrl-C does: the whole group gets it
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(180) == 0
        until("everything has ended", lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def descendants(pid: int) -> list[int]:
    from charonia.composition.children import descendants as below

    return [child for child, _ in below(pid)]


# -- in this process ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of this process, with a repository's model beside."""
    models = tmp_path_factory.mktemp("bound") / "models"
    (models / "written/1").mkdir(parents=True)
    (models / "written/1/model.py").write_text(
        "import triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('Y', r.inputs()[0].as_numpy() * 7)])"
        " for r in requests]\n"
    )
    (models / "written/config.pbtxt").write_text(
        'backend: "python" input { name: "X" data_type: TYPE_INT32 dims: -1 } '
        'output { name: "Y" data_type: TYPE_INT32 dims: -1 }'
    )
    made = Server(**FREE, model_repository=[models])
    made.bind("together", together, inputs=X, outputs=Y, max_batch_size=8, dynamic_batching=TWO)
    made.bind("moods", moods, inputs=X, outputs=Y)
    made.bind("each", each, inputs=X, outputs=Y, style="requests", max_batch_size=4)
    made.bind("countdown", countdown, inputs=X, outputs=Y)
    with made:
        yield made


def countdown(X: Any) -> Iterator[Any]:
    for number in range(int(X[0]), 0, -1):
        if number == 5:
            raise NotFound("no five")
        yield np.array([number], np.int32)


TWO = {"preferred_batch_size": [2], "max_queue_delay_microseconds": 600_000_000}


def together(X: Any) -> Any:
    return {"Y": np.broadcast_to(np.int32(len(X)), X.shape)}


def moods(X: Any) -> Any:
    match X[0]:
        case 1:
            raise NotFound("not here")
        case 2:
            raise RuntimeError("no good")
        case 3:
            return {"Y": X.astype(np.float64)}
    return {"Y": X}


def each(requests: list[charonia.Request]) -> list[Any]:
    return [
        {"Y": request.inputs["X"] * request.parameters["by"]}
        if "by" in request.parameters
        else InvalidArgument("by what?")
        for request in requests
    ]


def test_requests_of_several_clients_are_joined(server: Server) -> None:
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda kind: ask(server, "together", [[5]], kind), ["http", "grpc"]))
    assert [answer.tolist() for answer in answers] == [[[2]], [[2]]]


@pytest.mark.parametrize("kind", ["http", "grpc"])
@pytest.mark.parametrize(
    ("mood", "text", "status"),
    [
        (1, "not here", "NOT_FOUND 404"),
        (2, "RuntimeError: no good", "INTERNAL 500"),
        (3, "unexpected datatype TYPE_FP64 for inference output 'Y' of model 'moods'", "INTERNAL 500"),
    ],
)
def test_errors_are_typed(mood: int, text: str, status: str, kind: str, server: Server) -> None:
    with pytest.raises(InferenceServerException, match=text) as caught:
        ask(server, "moods", [mood], kind)
    assert caught.value.status().removeprefix("StatusCode.") in status.split()
    assert ask(server, "moods", [4], kind).tolist() == [4]


def test_a_function_over_requests_sees_their_parameters(server: Server) -> None:
    assert ask(server, "each", [[3]], parameters={"by": 5}).tolist() == [[15]]
    with pytest.raises(InferenceServerException, match=r"by what\?"):
        ask(server, "each", [[3]])


def test_a_generator_answers_many_times(server: Server) -> None:
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    tensor = grpc.InferInput("X", [1], "INT32")
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        tensor.set_data_from_numpy(np.array([3], np.int32))
        client.async_stream_infer("countdown", [tensor])
        got = [answers.get(timeout=60)[0].as_numpy("Y").tolist() for _ in range(3)]
        assert got == [[3], [2], [1]]
        tensor.set_data_from_numpy(np.array([6], np.int32))
        client.async_stream_infer("countdown", [tensor])
        assert answers.get(timeout=60)[0].as_numpy("Y").tolist() == [6]
        assert "no five" in str(answers.get(timeout=60)[1])
        client.stop_stream()


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_large_arrays_come_back_whole(kind: str, server: Server) -> None:
    value = np.arange(300_000, dtype=np.int32)
    assert (ask(server, "moods", value, kind) == value).all()


def test_models_of_a_repository_are_served_beside(server: Server) -> None:
    assert ask(server, "written", [1, 2]).tolist() == [7, 14]


def test_it_is_counted(server: Server) -> None:
    import urllib.request

    ask(server, "moods", [4])

    def page() -> str:
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    until("it is counted", lambda: re.search(r'nv_inference_count\{model="moods",version="1"\} [1-9]', page()))


def test_a_started_server_takes_no_more(server: Server) -> None:
    with pytest.raises(InvalidArgument, match="'late' cannot be bound: the server has started"):
        server.bind("late", together, inputs=X, outputs=Y)
    with pytest.raises(StartupError, match="the server has started already"):
        server.start()


def test_another_program_joins_the_log_and_serves_through_the_same_gateway(server: Server, tmp_path: Path) -> None:
    assert server.log_url
    program = tmp_path / "joining.py"
    program.write_text(
        "import numpy as np, charonia, sys\n"
        "t = [charonia.TensorSpec(n, np.int32, [-1]) for n in 'XY']\n"
        "server = charonia.Server(log_url=sys.argv[1])\n"
        "server.bind('joined', lambda d: d['X'] + 1000, inputs=t[:1], outputs=t[1:])\n"
        "with server:\n"
        "    print('up', flush=True)\n"
        "    server.wait()\n"
    )
    command = [sys.executable, str(program), server.log_url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"

        def ready() -> bool:
            with http.InferenceServerClient(server.http) as client:
                return bool(client.is_model_ready("joined"))

        until("the gateway knows of it", ready)
        assert ask(server, "joined", [1]).tolist() == [1001]
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def test_it_starts_again_and_in_any_thread() -> None:
    state: dict[str, int] = {"calls": 0}

    def function(X: Any) -> Any:
        state["calls"] += 1
        return X

    server = Server(charonia.bind(function, inputs=X, outputs=Y), **FREE)

    def run() -> None:
        for _ in range(2):
            with server:
                ask(server, "function", [1])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    assert state["calls"] == 2
    assert server.stop()


def test_a_start_that_fails_leaves_nothing() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = Server(charonia.bind(together, inputs=X, outputs=Y), **{**FREE, "http_port": port})
        with pytest.raises(StartupError, match="gateway ended with status 1 while starting"):
            server.start()
    with pytest.raises(StartupError, match="nothing is bound"):
        Server(**FREE).start()
    with pytest.raises(StartupError, match=r"charonia\.Server has no option 'https_port'"):
        Server(https_port=1)
    assert server.stop()


def test_a_program_that_forgets_to_stop_ends_all_the_same(tmp_path: Path) -> None:
    program = tmp_path / "forgetting.py"
    program.write_text(
        "import numpy as np, charonia, os, time\n"
        "t = [charonia.TensorSpec(n, np.int32, [-1]) for n in 'XY']\n"
        "server = charonia.Server(http_port=0, grpc_port=0, metrics_port=0, exit_timeout_secs=10)\n"
        "server.bind('m', lambda X: X, inputs=t[:1], outputs=t[1:])\n"
        "server.bind('r', lambda rs: [r.inputs['X'] for r in rs], inputs=t[:1], outputs=t[1:], style='requests')\n"
        "server.start()\n"
        "from charonia.composition.children import descendants\n"
        "print(*(pid for pid, _ in descendants(os.getpid())), flush=True)\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    children = [int(pid) for pid in done.stdout.split()]
    assert len(children) >= 2
    until("everything has ended", lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
