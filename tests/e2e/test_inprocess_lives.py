"""How a server of the in-process API starts and ends, alone and beside others, and what is left of it (R42)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from e2e_asking import until
from e2e_models import gated, python, scaling, scaling_graph

from charonia.composition.children import descendants
from charonia.composition.state_directory import StateDirectory
from charonia.eventlog.embedded import short_directory
from charonia.inprocess import (
    InternalError,
    InvalidArgumentError,
    ModelControlMode,
    NotFoundError,
    Server,
    UnavailableError,
    UnsupportedError,
)

REPOSITORY = Path(__file__).resolve().parents[2]
ROW = {"INPUT0": np.ones((1, 4), np.float32)}
VALUE = {"VALUE": np.array([1], np.int32)}
EXPLICIT: Any = {"model_control_mode": ModelControlMode.EXPLICIT}


def first(server: Server, model: str) -> float:
    (response,) = server.model(model).infer(inputs=ROW)
    return float(np.from_dlpack(response.outputs["OUTPUT0"])[0, 0])


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process, no thread and no file of any server of the test."""
    made: list[Path] = []

    def make(prefix: str) -> str:
        made.append(Path(tempfile.mkdtemp(prefix=prefix)))
        return str(made[-1])

    def sockets_of(state: Path) -> Path:
        made.append(short_directory(state))
        return made[-1]

    def memory_of(state: StateDirectory) -> str:
        if found := memory_directory(state):
            made.append(Path(found))
        return found

    memory_directory = StateDirectory.memory_directory
    monkeypatch.setattr(StateDirectory, "memory_directory", memory_of)
    monkeypatch.setattr("charonia.composition.hosting.tempfile", SimpleNamespace(mkdtemp=make))
    monkeypatch.setattr("charonia.composition.supervisor.short_directory", sockets_of)
    processes, threads = set(descendants(os.getpid())), set(threading.enumerate())
    yield
    # what was there before may have ended meanwhile, and what is stopped takes its time to be gone
    until("its processes are gone", lambda: set(descendants(os.getpid())) <= processes)
    until("its threads are gone", lambda: set(threading.enumerate()) <= threads)
    assert not [directory for directory in made if directory.exists()]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    repository = tmp_path / "models"
    scaling(repository, "double", 2.0)
    scaling(repository, "triple", 3.0)
    return repository


def test_it_starts_again_and_in_any_thread(models: Path) -> None:
    server = Server(model_repository=str(models))
    answers = []

    def run() -> None:
        for _ in range(2):
            server.start(wait_until_ready=True, timeout=60)
            answers.append(first(server, "double"))
            server.stop()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(240)
    assert answers == [2.0, 2.0]


def test_one_that_is_not_started(models: Path) -> None:
    server = Server(model_repository=str(models))

    def check() -> None:
        for ask in (server.ready, server.live, server.stop, server.metadata, server.models, server.metrics):
            with pytest.raises(InvalidArgumentError, match=r"^Server not started$"):
                ask()
        for ask_for in (server.model, server.load, server.unload, server.register_model_repository):
            with pytest.raises(InvalidArgumentError, match=r"^Server not started$"):
                ask_for("double")

    check()
    with server:
        model = server.model("double")
        responses = model.infer(inputs=ROW)
    check()
    with pytest.raises(UnavailableError, match="Server exiting"):
        model.infer(inputs=ROW)
    with pytest.raises(UnavailableError, match="Server exiting"):
        model.metadata()
    (response,) = responses  # it was answered before the server ended
    array = np.from_dlpack(response.outputs["OUTPUT0"])
    assert array.tolist() == [[2.0] * 4]
    responses.cancel()


@pytest.mark.long
def test_a_repository_that_is_broken(models: Path, tmp_path: Path) -> None:
    with pytest.raises(InternalError, match=r"model repository '.*nowhere' is not a directory"):
        Server(model_repository=str(tmp_path / "nowhere")).start()
    with pytest.raises(TypeError):
        Server(model_repository=1).start()
    with pytest.raises(InvalidArgumentError):
        Server(model_repository=None).start()
    python(models, "broken", "this is no Python", 'input { name: "X" data_type: TYPE_INT32 dims: [1] }')
    server = Server(model_repository=str(models))
    with pytest.raises(InternalError, match=r"^failed to load all models: broken: "):
        server.start()
    with pytest.raises(InvalidArgumentError, match="Server not started"):
        server.ready()
    server.options.exit_on_error = False
    with pytest.raises(UnavailableError, match=r"^Timeout before ready$"):
        server.start(wait_until_ready=True, timeout=0.2, polling_interval=0.01)
    assert (server.live(), server.ready()) == (True, False)
    states = {key: model.state for key, model in server.models().items()}
    assert states == {("broken", 1): "UNAVAILABLE", ("double", 1): "READY", ("triple", 1): "READY"}
    assert server.models()["broken", 1].reason
    assert first(server, "double") == 2.0
    server.stop()


@pytest.mark.long
def test_a_gateway_that_cannot_start_is_undone(
    models: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sockets of the parts lie below the directory for temporary files, whose path may be too long for them."""
    far = tmp_path_factory.mktemp("x" * 100)
    state = tempfile.mkdtemp(prefix="charonia-test-")
    server = Server(model_repository=str(models), serve_options={"state_dir": state})
    with monkeypatch.context() as context:
        context.setattr(tempfile, "tempdir", str(far))
        with pytest.raises(InternalError, match=r"cannot listen on .*: AF_UNIX path too long"):
            server.start()
    with server:
        assert first(server, "double") == 2.0
    shutil.rmtree(state)


def test_models_are_loaded_and_unloaded(models: Path) -> None:
    with Server(model_repository=[str(models)], startup_models=["double"], **EXPLICIT) as server:
        states = {key: model.state for key, model in server.models().items()}
        assert states == {("double", 1): "READY", ("triple", -1): None}
        with pytest.raises(NotFoundError):
            server.model("triple").infer(inputs=ROW)
        triple = server.load("triple")
        assert (triple.name, triple.version, first(server, "triple")) == ("triple", -1, 3.0)
        assert triple.ready()
        server.unload(triple, wait_until_unloaded=True, timeout=60)
        assert not triple.ready()
        assert server.models()["triple", 1].state == "UNAVAILABLE"
        server.unload("double")
        server.unload("unknown")
        for repository_change in (server.register_model_repository, server.unregister_model_repository):
            with pytest.raises(UnsupportedError, match="is not supported: a server's repositories are those of its"):
                repository_change(str(models))


def test_a_load_may_override_configuration_and_files(models: Path) -> None:
    with Server(model_repository=str(models), **EXPLICIT) as server:
        config = {"backend": "onnxruntime", "max_batch_size": 2}
        server.load("double", {"config": json.dumps(config)})
        assert server.model("double").config()["max_batch_size"] == 2
        files = {"config": json.dumps(config), "file:1/model.onnx": scaling_graph(5.0)}
        server.load("double", files)
        assert first(server, "double") == 5.0
        server.load("new", files)
        assert first(server, "new") == 5.0
        server.unload("double", wait_until_unloaded=True)
        server.load("double")
        assert (first(server, "double"), server.model("double").config()["max_batch_size"]) == (2.0, 8)
        for parameters, text in (
            ({"config": b"{}"}, "Config parameter 'config' must have string type for its value"),
            ({"file:1/model.onnx": "text"}, "File parameter 'file:1/model.onnx' must have bytes type for its value"),
            ({"file:1/model.onnx": b""}, "Load parameter 'config' must be specified for model file override"),
            ({"other": 3}, "Unrecognized load parameter 'other' with type 'INT'"),
            ({"other": True}, "Unrecognized load parameter 'other' with type 'BOOL'"),
        ):
            with pytest.raises(InvalidArgumentError, match=text):
                server.load("double", parameters)  # type: ignore[arg-type]
        with pytest.raises(InternalError, match="failed to load 'missing'"):
            server.load("missing")
        assert first(server, "double") == 2.0


@pytest.mark.long
def test_two_servers_know_nothing_of_one_another(models: Path, tmp_path: Path) -> None:
    scaling(tmp_path / "others", "double", 7.0)
    with (
        Server(model_repository=str(models)) as one,
        Server(model_repository=str(tmp_path / "others"), server_id="two") as two,
    ):
        assert (first(one, "double"), first(two, "double")) == (2.0, 7.0)
        assert (one.metadata()["name"], two.metadata()["name"]) == ("triton", "two")
        assert set(two.models()) == {("double", 1)}
        two.stop()
        assert first(one, "double") == 2.0
        until("it is counted", lambda: "nv_inference_count" in one.metrics())


def test_metrics_may_be_off(models: Path) -> None:
    with Server(model_repository=str(models), metrics=False) as server:
        assert first(server, "double") == 2.0
        assert "nv_" not in server.metrics()


@pytest.mark.long
def test_a_state_directory_is_kept_and_held(models: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    kept: Any = {"model_repository": str(models), "serve_options": {"state_dir": str(state)}}
    with Server(**kept) as server:
        with pytest.raises(InternalError, match=rf"'{state}' is used by another charonia serve \(pid {os.getpid()}"):
            Server(**kept).start()
        assert first(server, "double") == 2.0
    assert state.is_dir()
    with Server(**kept) as server:
        assert first(server, "double") == 2.0


def test_a_stop_waits_for_what_is_open(models: Path, tmp_path: Path) -> None:
    gated(models, "gated", "")
    gate, entered = tmp_path / "gate", tmp_path / "entered"
    server = Server(model_repository=str(models)).start(wait_until_ready=True)
    model = server.model("gated")
    responses = model.infer(inputs=VALUE, parameters={"gate": str(gate), "entered": str(entered)})
    until("it runs", entered.exists)
    stopping = threading.Thread(target=server.stop)
    stopping.start()

    def refused() -> bool:
        try:
            server.model("double").infer(inputs=ROW)
        except UnavailableError:
            return True
        return False

    until("nothing new is taken", refused)
    gate.touch()
    (response,) = responses
    assert response.final
    assert np.from_dlpack(response.outputs["ECHO"]).tolist() == [1]
    stopping.join(60)
    assert not stopping.is_alive()


@pytest.mark.long
def test_a_stop_does_not_wait_for_ever(models: Path, tmp_path: Path) -> None:
    gated(models, "gated", "")
    gate, entered = tmp_path / "gate", tmp_path / "entered"
    server = Server(model_repository=str(models), exit_timeout=1).start(wait_until_ready=True)
    given = {"gate": str(gate), "entered": str(entered)}
    responses = server.model("gated").infer(inputs=VALUE, parameters=given)
    until("it runs", entered.exists)
    with pytest.raises(InternalError, match=r"^Exit timeout expired. Exiting immediately\.$"):
        server.stop()
    with pytest.raises(UnavailableError, match="Server exiting"):
        next(responses)
    with pytest.raises(InvalidArgumentError, match="Server not started"):
        server.stop()


# -- programs ----------------------------------------------------------------------------------------------------------


def program(tmp_path: Path, text: str, *words: str) -> subprocess.Popen[str]:
    path = tmp_path / "program.py"
    path.write_text(
        "import os, sys, numpy as np\n"
        "from charonia.inprocess import *\n"
        "from charonia.composition.children import descendants\n"
        "def tell(what): print(what, *(pid for pid, _ in descendants(os.getpid())), flush=True)\n" + text
    )
    with (tmp_path / "errors").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, str(path), *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=REPOSITORY,
            start_new_session=True,
            # who runs the tests in the background of a script ignores Ctrl-C, and so would this
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


def told(process: subprocess.Popen[str], what: str) -> list[int]:
    """The processes below it when it said so."""
    assert process.stdout is not None
    word, *pids = process.stdout.readline().split()
    assert word == what
    return [int(pid) for pid in pids]


def ended(process: subprocess.Popen[str], pids: list[int], tmp_path: Path) -> tuple[int, str, str]:
    # not communicate(): it reads the descriptor, without the lines readline() took together with the first
    assert process.stdout is not None
    with process.stdout:
        out = process.stdout.read()
    process.wait(timeout=120)
    errors = (tmp_path / "errors").read_text()
    until("everything has ended", lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    return process.returncode, out, errors


@pytest.mark.long
def test_ctrl_c_while_a_program_waits_for_an_answer(models: Path, tmp_path: Path) -> None:
    gated(models, "gated", "")
    gate, entered = tmp_path / "gate", tmp_path / "entered"
    process = program(
        tmp_path,
        "repository, gate, entered = sys.argv[1:]\n"
        "server = Server(model_repository=repository).start(wait_until_ready=True)\n"
        "value = {'VALUE': np.array([1], np.int32)}\n"
        "responses = server.model('gated').infer(inputs=value, parameters={'gate': gate, 'entered': entered})\n"
        "try:\n"
        "    tell('asked')\n"
        "    next(responses)\n"
        "except KeyboardInterrupt:\n"
        "    open(gate, 'w').close()\n"
        "    print(next(responses).final, server.ready(), flush=True)\n"
        "server.stop()\n",
        *map(str, (models, gate, entered)),
    )
    pids = told(process, "asked")
    assert len(pids) >= 5
    until("it runs", entered.exists)
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process, pids, tmp_path) == (0, "True True\n", "")


@pytest.mark.long
def test_ctrl_c_while_it_starts(tmp_path: Path) -> None:
    slow = "import time, os\nopen(os.path.dirname(__file__) + '/../entered', 'w').close()\ntime.sleep(60)\n"
    python(tmp_path / "models", "slow", slow, 'input { name: "X" data_type: TYPE_INT32 dims: [1] }')
    process = program(
        tmp_path,
        "server = Server(model_repository=sys.argv[1], exit_timeout=10)\n"
        "tell('starting')\n"
        "try:\n"
        "    server.start()\n"
        "except KeyboardInterrupt:\n"
        "    tell('interrupted')\n",
        str(tmp_path / "models"),
    )
    told(process, "starting")
    until("the model is being loaded", (tmp_path / "models/slow/entered").exists)
    pids = [pid for pid, _ in descendants(process.pid)]
    os.killpg(process.pid, signal.SIGINT)
    assert told(process, "interrupted") == []
    assert ended(process, pids, tmp_path) == (0, "", "")


@pytest.mark.parametrize("end", ["forgets", "fails", "is killed", "is forked"])
@pytest.mark.long
def test_a_program_that_does_not_stop_its_server(models: Path, tmp_path: Path, end: str) -> None:
    process = program(
        tmp_path,
        "server = Server(model_repository=sys.argv[1], exit_timeout=10).start(wait_until_ready=True)\n"
        "tell('up')\n"
        "if sys.argv[2] == 'fails': raise SystemExit('no more')\n"
        "if sys.argv[2] == 'is killed': os.kill(os.getpid(), 9)\n"
        "if sys.argv[2] == 'is forked':\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        try: server.model('double').metadata()\n"
        "        except UnavailableError: os._exit(7)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), server.ready(), flush=True)\n",
        str(models),
        end,
    )
    pids = told(process, "up")
    expected: dict[str, tuple[int, str, str | None]] = {
        "forgets": (0, "", ""),
        "fails": (1, "", "no more\n"),
        "is killed": (-9, "", None),  # the heartbeat process reports a loss
        "is forked": (0, "7 True\n", ""),
    }
    code, out, errors = ended(process, pids, tmp_path)
    assert (code, out, None if end == "is killed" else errors) == expected[end]


def test_the_example_as_a_user_runs_it(few_models: Path, tmp_path: Path) -> None:
    source = REPOSITORY / "examples" / "inputs" / "sample.rs"
    command = [sys.executable, "examples/inprocess.py", str(source), f"--model-repository={few_models}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "sample.rs: rust",
        f"together: {[float(number) for number in range(16)]}",
        "identity: UNAVAILABLE",
        "Request for unknown model: 'no_such_model' is not found",
    ]


def test_the_page_shows_the_example() -> None:
    page = (REPOSITORY / "docs/howto/inprocess.md").read_text()
    source = (REPOSITORY / "examples/inprocess.py").read_text()
    (shown,) = [part.partition("```")[0] for part in page.split("```python\n")[1:2]]
    body = source.partition("def main() -> None:\n")[2]
    lines = [line.strip() for line in shown.splitlines() if line.strip() and "import" not in line]
    assert len(lines) > 8
    missing = [line for line in lines if line not in {each.strip() for each in body.splitlines()}]
    assert not missing
