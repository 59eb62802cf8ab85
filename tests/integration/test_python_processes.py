"""Python models that crash, hang, outlive their executor or say that they are not well, in real model processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
from python_instances import ECHO, IDENTITY, Load, numbers, request, source

from charonia.backend import InstanceDied
from charonia.errors import InternalError
from executors.backends.python import frame_calls


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # a zombie still has its number until its parent, or init, has collected it
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return True


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


FRAGILE = """
    import ctypes, os, signal, stat, sys, time

    class TritonPythonModel:
        def execute(self, requests):
            what = requests[0].request_id()
            print("doing", what)
            if what == "exit":
                os._exit(7)
            if what == "segfault":
                ctypes.string_at(0)
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "hang":
                time.sleep(1000)
            if what == "spin":
                while True:
                    pass
            if what == "garbage":
                for entry in os.scandir("/proc/self/fd"):
                    if os.path.exists(entry.path) and stat.S_ISSOCK(os.stat(entry.path).st_mode):
                        os.write(int(entry.name), b"x" * 100)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones(1, np.float32))]) for _ in requests]
"""
ONE_SECOND = IDENTITY + ' parameters { key: "charonia.max_execution_s" value { string_value: "1" } }'


# -- death and hanging -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "reason", "last_words"),
    [
        ("exit", "exited with code 7.", "doing exit"),
        ("segfault", "was ended by signal 11 (SIGSEGV).", "Segmentation fault"),
        ("kill", "was ended by signal 9 (SIGKILL).", "doing kill"),
        ("hang", "was killed: it ran longer than 1 s (charonia.max_execution_s).", " in execute"),
        ("spin", "was killed: it ran longer than 1 s (charonia.max_execution_s).", " in execute"),
        ("garbage", "it does not keep to the protocol: bytes between executor and model process", "doing garbage"),
    ],
)
async def test_a_crash_or_a_hang_ends_one_instance_only(load: Load, what: str, reason: str, last_words: str) -> None:
    ceiling = ONE_SECOND if what in ("hang", "spin") else IDENTITY  # a busy machine takes its time for the others
    victim, neighbour = await load(FRAGILE, ceiling), await load(FRAGILE, name="m_0_1")
    calls = [victim.execute_requests([request(numbers(1), id=text)]) for text in (what, "after")]
    async with asyncio.timeout(60):
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        (healthy,) = await neighbour.execute_requests([request(numbers(1))])
    assert isinstance(first, InstanceDied)
    assert isinstance(second, InstanceDied)
    assert str(first).startswith("Stub process 'm_0_0' is not healthy. The process (pid ")
    assert reason in str(first)
    assert last_words in first.stderr
    assert first.shared is (what == "kill"), "what ended it may have come from outside"
    assert gone(victim.pid)
    assert healthy.error is None
    with pytest.raises(InstanceDied, match="is not healthy"):
        await victim.execute_requests([request(numbers(1))])


async def test_a_call_that_ends_soon_after_its_time_ends_nothing(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_calls, "_TRACEBACK_S", 60.0)
    instance = await load(
        """
        import os, time

        class TritonPythonModel:
            def execute(self, requests):
                while not os.path.exists(requests[0].request_id()):
                    time.sleep(0.001)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones(1, np.float32))])]
        """,
        ONE_SECOND,
    )
    running = asyncio.ensure_future(instance.execute_requests([request(numbers(1), id=str(tmp_path / "go"))]))
    async with asyncio.timeout(60):
        while " in execute" not in instance._child.last_lines():
            await asyncio.sleep(0.001)
        (tmp_path / "go").touch()
        (answer,) = await running
        assert answer.error is None
        later = asyncio.ensure_future(instance.execute_requests([request(numbers(1), id=str(tmp_path / "never"))]))
        await asyncio.sleep(0)  # one turn of the loop: it has been sent
        os.kill(instance.pid, signal.SIGKILL)
        with pytest.raises(InstanceDied, match=r"was ended by signal 9 \(SIGKILL\)"):
            await later


async def test_giving_up_a_call_disturbs_nothing(load: Load) -> None:
    instance = await load(ECHO)
    call = asyncio.ensure_future(instance.execute_requests([request(numbers(1))]))
    await asyncio.sleep(0)  # one turn of the loop: it has been sent
    call.cancel()
    (answer,) = await instance.execute_requests([request(numbers(2))])
    assert answer.outputs[0].array().tolist() == [[2]]
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_model_that_does_not_finalize_is_ended(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executors.backends.python.process_settings.FINALIZE_S", 0.2)
    instance = await load("""
        import time

        class TritonPythonModel:
            def finalize(self):
                time.sleep(1000)
    """)
    async with asyncio.timeout(30):
        await instance.close_instance()
    assert gone(instance.pid)


async def test_a_forked_child_of_the_model_does_not_keep_it_alive(load: Load) -> None:
    instance = await load("""
        import os, time

        class TritonPythonModel:
            def execute(self, requests):
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
                os._exit(4)
    """)
    async with asyncio.timeout(30):
        with pytest.raises(InstanceDied, match="exited with code 4"):
            await instance.execute_requests([request(numbers(1))])


async def test_stop_signals_to_the_group_leave_the_model_to_its_executor(load: Load) -> None:
    instance = await load(ECHO)
    os.kill(instance.pid, signal.SIGINT)
    os.kill(instance.pid, signal.SIGTERM)
    (answer,) = await instance.execute_requests([request(numbers(3))])
    assert answer.outputs[0].array().tolist() == [[3]]


async def test_a_model_process_has_its_name_its_group_and_little_else(load: Load) -> None:
    instance = await load("""
        import sys

        class TritonPythonModel:
            def execute(self, requests):
                names = np.array(sorted(sys.modules), dtype=np.object_)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", names)]) for _ in requests]
    """)
    assert os.getpgid(instance.pid) == os.getpgid(0)
    assert "charonia-instance:m:m_0_0" in command_line(instance.pid)
    (answer,) = await instance.execute_requests([request(numbers(1))])
    modules = {name.decode() for name in answer.outputs[0].array()}
    heavy = "asyncio fastapi grpc redis hiredis onnxruntime google.protobuf ml_dtypes charonia.tensors"
    assert modules.isdisjoint(heavy.split())


EXECUTOR = """
import asyncio, sys
from pathlib import Path
from google.protobuf import text_format
from charonia.backend import InstanceSpec, ModelRequest, ModelSource
from charonia.models.interface import ModelInterface
from executors.backends.python import PythonBackend
from protos.model_config_pb2 import ModelConfig

async def main():
    config = text_format.Parse('name: "m" backend: "python"', ModelConfig())
    source = ModelSource("m", 1, Path(sys.argv[1]), config)
    model = await PythonBackend().load(source)
    instance = await model.create_instance(InstanceSpec("m_0", "CPU", -1, source, ModelInterface.of(config)))
    print(instance.pid, flush=True)
    await instance.execute_requests([ModelRequest("", 0, [], (), {})])

asyncio.run(main())
"""


async def test_model_processes_die_with_a_killed_executor(tmp_path: Path) -> None:
    model = source(
        tmp_path,
        """
        import sys, time

        class TritonPythonModel:
            def execute(self, requests):
                print("busy", flush=True)
                time.sleep(1000)
        """,
    )
    executor = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        EXECUTOR,
        str(model.directory),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert executor.stdout is not None
    assert executor.stderr is not None
    async with asyncio.timeout(60):
        pid = int(await executor.stdout.readline())
        descriptor = os.pidfd_open(pid)
        assert await executor.stderr.readline() == b"[m/m_0] busy\n"
        executor.kill()
        await executor.wait()
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, ended.set)
        await ended.wait()
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
    assert gone(pid)


WAITING = """
class TritonPythonModel:
    def execute(self, requests):
        print("waiting", flush=True)
        while not all(request.is_cancelled() for request in requests[1:]):
            pass
        first = requests[0].is_cancelled()
        return [pb_utils.InferenceResponse(parameters={"first": first}) for _ in requests]
"""


async def test_cancelled_requests_and_no_others_look_cancelled(load: Load) -> None:
    """P9."""
    instance = await load(WAITING)
    requests = [request(numbers(1)) for _ in range(3)]
    executing = asyncio.ensure_future(instance.execute_requests(requests))
    await asyncio.sleep(0)
    instance.cancel_requests(requests[2:])
    instance.cancel_requests([requests[1], request(numbers(1))])  # one of them runs nowhere
    responses = await asyncio.wait_for(executing, 30)
    assert [response.parameters for response in responses] == [{"first": False}] * 3
    instance.cancel_requests(requests)  # too late, and nothing is left of it
    (alone,) = await instance.execute_requests([request(numbers(1))])
    assert alone.parameters == {"first": False}


async def test_a_process_that_ends_while_it_is_closed_is_not_its_batchs_fault(load: Load) -> None:
    instance = await load(WAITING)
    executing = asyncio.ensure_future(instance.execute_requests([request(numbers(1)), request(numbers(1))]))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(instance.close_instance())
    await asyncio.sleep(0)
    os.kill(instance.pid, signal.SIGKILL)
    with pytest.raises(InstanceDied) as raised:
        await executing
    assert raised.value.blameless
    await closing


async def test_a_process_that_is_killed_is_its_batchs_fault(load: Load) -> None:
    instance = await load(WAITING)
    executing = asyncio.ensure_future(instance.execute_requests([request(numbers(1)), request(numbers(1))]))
    await asyncio.sleep(0)
    os.kill(instance.pid, signal.SIGKILL)
    with pytest.raises(InstanceDied) as raised:
        await executing
    assert not raised.value.blameless


async def test_a_process_that_died_idle_is_not_the_next_batchs_fault(load: Load) -> None:
    instance = await load(WAITING)
    os.kill(instance.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while instance._child.dead is None:
            await asyncio.sleep(0.001)
    with pytest.raises(InstanceDied) as raised:
        await instance.execute_requests([request(numbers(1))])
    assert raised.value.blameless


MOODY = """
    import os, sys, time
    class TritonPythonModel:
        def initialize(self, args):
            self.mood = "good"
        def is_ready(self):
            if self.mood == "raise":
                raise OSError("no database")
            if self.mood == "hang":
                while not os.path.exists(self.path):
                    time.sleep(0.001)
            if self.mood == "die":
                os._exit(3)
            return self.mood == "good"
        def execute(self, requests):
            for request in requests:
                told = json.loads(request.parameters())
                self.mood, self.path = told["mood"], told.get("path")
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
""".replace("import os,", "import json, os,")


# -- health ------------------------------------------------------------------------------------------------------------


async def test_a_model_says_whether_it_is_ready(load: Load, tmp_path: Path) -> None:
    instance = await load(MOODY)
    assert instance.checks_health
    assert await instance.check_health() is True
    await instance.execute_requests([request(numbers(1), parameters={"mood": "bad"})])
    assert await instance.check_health() is False
    await instance.execute_requests([request(numbers(1), parameters={"mood": "raise"})])
    with pytest.raises(InternalError, match="OSError: no database"):
        await instance.check_health()


async def test_a_question_that_takes_long_is_asked_once(load: Load, tmp_path: Path) -> None:
    instance = await load(MOODY)
    gate = tmp_path / "gate"
    await instance.execute_requests([request(numbers(1), parameters={"mood": "hang", "path": str(gate)})])
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(instance.check_health(), 0.02)
    waiting = asyncio.create_task(instance.check_health())
    gate.touch()
    assert await waiting is False
    await instance.execute_requests([request(numbers(1), parameters={"mood": "good"})])
    assert await instance.check_health() is True


async def test_a_process_that_dies_of_its_health_function_is_no_batchs_fault(load: Load) -> None:
    instance = await load(MOODY)
    await instance.execute_requests([request(numbers(1), parameters={"mood": "die"})])
    asked = asyncio.create_task(instance.check_health())
    await asyncio.sleep(0)
    with pytest.raises(InstanceDied) as caught:
        await instance.execute_requests([request(numbers(1), parameters={"mood": "good"})])
    assert caught.value.blameless
    with pytest.raises(InstanceDied):
        await asked


async def test_models_without_a_health_function_are_never_asked(load: Load) -> None:
    assert not (await load(ECHO)).checks_health
