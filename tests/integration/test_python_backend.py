"""The python backend with real model files in real model processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from google.protobuf import text_format

from charonia.backend import InstanceDied, InstanceSpec, ModelRequest, ModelResponse, ModelSource, RequestInstance
from charonia.errors import CharoniaError, ErrorCode, InternalError, InvalidArgument
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from executors.backends.python import PythonBackend
from executors.backends.python.instance import PythonInstance
from protos.model_config_pb2 import ModelConfig

IDENTITY = 'input { name: "IN" data_type: TYPE_FP32 dims: -1 } output { name: "OUT" data_type: TYPE_FP32 dims: -1 }'
Load = Callable[..., Awaitable[PythonInstance]]


def source(
    directory: Path, code: str, config: str = IDENTITY, settings: Mapping[str, str] | None = None
) -> ModelSource:
    version = directory / "m" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(
        "import triton_python_backend_utils as pb_utils\nimport numpy as np\n" + textwrap.dedent(code)
    )
    parsed = text_format.Parse(f'name: "m" backend: "python" max_batch_size: 8 {config}', ModelConfig())
    return ModelSource("m", 1, directory / "m", parsed, settings or {})


@pytest.fixture
async def load(tmp_path: Path) -> AsyncIterator[Load]:
    """Loads model code as an instance, by default `m_0_0`; all are closed at the end."""
    loaded: list[PythonInstance] = []

    async def create(code: str, config: str = IDENTITY, name: str = "m_0_0", **settings: str) -> PythonInstance:
        model = source(tmp_path, code, config, {key.replace("_", "-"): value for key, value in settings.items()})
        spec = InstanceSpec(name, "CPU", -1, model, ModelInterface.of(model.config))
        instance = await PythonBackend().create_instance(spec)
        loaded.append(instance)
        return instance

    yield create
    for instance in loaded:
        await instance.close_instance()


def request(*inputs: Tensor, **fields: object) -> ModelRequest:
    values: dict[str, object] = {"id": "", "correlation_id": 0, "outputs": (), "parameters": {}, **fields}
    return ModelRequest(inputs=list(inputs), **values)  # type: ignore[arg-type]


def numbers(*values: float) -> Tensor:
    return Tensor.of("IN", np.array([values], dtype=np.float32))


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # a zombie still has its number until its parent, or init, has collected it
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return True


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def error_of(response: ModelResponse) -> CharoniaError:
    assert response.error is not None
    return response.error


ADD_SUB = """
    class TritonPythonModel:
        def execute(self, requests):
            responses = []
            for request in requests:
                a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
                b = pb_utils.get_input_tensor_by_name(request, "B").as_numpy()
                responses.append(
                    pb_utils.InferenceResponse([pb_utils.Tensor("SUM", a + b), pb_utils.Tensor("DIFF", a - b)])
                )
            return responses
"""
ADD_SUB_CONFIG = """
    input { name: "A" data_type: TYPE_INT32 dims: 3 } input { name: "B" data_type: TYPE_INT32 dims: 3 }
    output { name: "SUM" data_type: TYPE_INT32 dims: 3 } output { name: "DIFF" data_type: TYPE_INT32 dims: 3 }
"""


async def test_requests_of_a_batch_get_their_own_answers_in_order(load: Load) -> None:
    instance = await load(ADD_SUB, ADD_SUB_CONFIG)
    assert isinstance(instance, RequestInstance)
    a, b = np.array([[1, 2, 3]], np.int32), np.array([[10, 20, 30]], np.int32)
    batch = [request(Tensor.of("A", a * n), Tensor.of("B", b)) for n in (1, 2, 3)]
    answers = await instance.execute_requests(batch)
    for n, answer in zip((1, 2, 3), answers, strict=True):
        assert [tensor.name for tensor in answer.outputs] == ["SUM", "DIFF"]
        assert answer.outputs[0].array().tolist() == (a * n + b).tolist()
        assert answer.outputs[1].array().tolist() == (a * n - b).tolist()


async def test_only_requested_outputs_are_sent(load: Load) -> None:
    instance = await load(ADD_SUB, ADD_SUB_CONFIG)
    tensors = [Tensor.of(name, np.ones((1, 3), np.int32)) for name in "AB"]
    (answer,) = await instance.execute_requests([request(*tensors, outputs=("DIFF",))])
    assert [tensor.name for tensor in answer.outputs] == ["DIFF"]


ECHO = """
    class TritonPythonModel:
        def execute(self, requests):
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
                for request in requests
            ]
"""


@pytest.mark.parametrize(
    "array",
    [
        np.array([[b"a", b"", b"\x00\xff", "käse".encode()]], dtype=np.object_),
        np.zeros((2, 0), np.float32),
        np.array([[True, False]]),
        np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.array([[1.5, -2]], np.float16),
        np.array([[1.5, -2, 3e38]], ml_dtypes.bfloat16),
        np.array([[2**64 - 1]], np.uint64),
        np.array([[-(2**63)]], np.int64),
    ],
    ids=lambda array: f"{array.dtype}",
)
async def test_every_kind_of_tensor_comes_back_equal(load: Load, array: np.ndarray) -> None:
    instance = await load(ECHO)
    (answer,) = await instance.execute_requests([request(Tensor.of("IN", array))])
    (tensor,) = answer.outputs
    assert tensor.datatype is Tensor.of("IN", array).datatype
    assert tensor.shape == array.shape
    assert tensor.array().tolist() == array.tolist()


async def test_a_model_sees_the_facts_of_its_requests(load: Load) -> None:
    instance = await load("""
        import json

        class TritonPythonModel:
            def execute(self, requests):
                responses = []
                for r in requests:
                    facts = [r.request_id(), r.correlation_id(), r.requested_output_names(), r.flags(), r.timeout(),
                             json.loads(r.parameters()), r.is_cancelled(), r.inputs()[0].shape(),
                             r.inputs()[0].triton_dtype(), r.inputs()[0].is_cpu(), r.trace().get_context()]
                    text = np.array([json.dumps(facts)], dtype=np.object_)
                    responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)], parameters={"k": 1}))
                return responses
    """)
    plain = request(numbers(1))
    full = request(
        numbers(1), id="x", correlation_id="s1", outputs=("OUT",), parameters={"p": 2}, timeout_us=7, flags=3
    )
    answers = await instance.execute_requests([plain, full])
    facts = [json.loads(answer.outputs[0].array()[0]) for answer in answers]
    assert facts[0] == ["", 0, ["OUT"], 0, 0, {}, False, [1, 1], 11, True, None]
    assert facts[1] == ["x", "s1", ["OUT"], 3, 7, {"p": 2}, False, [1, 1], 11, True, None]
    assert answers[0].parameters == {"k": 1}


async def test_large_tensors_both_ways_at_once(load: Load) -> None:
    instance = await load(ECHO)
    array = np.arange(5_000_000, dtype=np.float32)[None]
    batch = [request(Tensor.of("IN", array + n)) for n in range(3)]
    calls = await asyncio.gather(instance.execute_requests(batch[:2]), instance.execute_requests(batch[2:]))
    answers = [*calls[0], *calls[1]]
    for n, answer in enumerate(answers):
        np.testing.assert_array_equal(answer.outputs[0].array(), array + n)


async def test_an_error_of_one_request_leaves_the_others_alone(load: Load) -> None:
    instance = await load("""
        class TritonPythonModel:
            def execute(self, requests):
                ok = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones(1, np.float32))])
                bad = pb_utils.InferenceResponse(
                    [pb_utils.Tensor("OUT", np.ones(1, np.float32))],
                    error=pb_utils.TritonError("no such row", pb_utils.TritonError.NOT_FOUND),
                )
                plain = pb_utils.InferenceResponse(error=pb_utils.TritonError("broken"))
                return [ok, bad, plain]
    """)
    ok, bad, plain = await instance.execute_requests([request(numbers(1))] * 3)
    assert ok.error is None
    assert ok.outputs[0].array().tolist() == [1]
    assert (error_of(bad).code, error_of(bad).message, bad.outputs) == (ErrorCode.NOT_FOUND, "no such row", [])
    assert (error_of(plain).code, error_of(plain).message) == (ErrorCode.INTERNAL, "broken")


async def test_an_exception_fails_the_batch_with_its_place(load: Load, tmp_path: Path) -> None:
    instance = await load("""
        class TritonPythonModel:
            def execute(self, requests):
                return self.helper()
            def helper(self):
                raise ValueError("bad value")
    """)
    answers = await instance.execute_requests([request(numbers(1))] * 2)
    path = tmp_path / "m" / "1" / "model.py"
    expected = (
        "Failed to process the request(s) for model 'm_0_0', message: ValueError: bad value\n\nAt:\n"
        f"  {path}(8): helper\n  {path}(6): execute\n"
    )
    for answer in answers:
        assert error_of(answer).code is ErrorCode.INTERNAL
        assert error_of(answer).message == expected
    (again,) = await instance.execute_requests([request(numbers(1))])
    assert error_of(again).message == expected


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (
            "[]",
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:2, and InferenceResponse(s) size is:0\n",
        ),
        ("None", "Expected a list in the execute return, found type '<class 'NoneType'>'."),
        (
            "[1, 2]",
            "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'int'>'.",
        ),
    ],
)
async def test_wrong_returns_fail_the_batch(load: Load, returned: str, text: str) -> None:
    instance = await load(f"""
        class TritonPythonModel:
            def execute(self, requests):
                return {returned}
    """)
    answers = await instance.execute_requests([request(numbers(1))] * 2)
    expected = f"Failed to process the request(s) for model 'm_0_0', message: {text}"
    assert [error_of(answer).message for answer in answers] == [expected] * 2


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("sys.exit(3)", "SystemExit: 3\n\nAt:"),
        ("pb_utils.InferenceResponse([None])", "Output tensor for inference response should not be empty."),
        ("pb_utils.Tensor('', np.ones(1))", "Tensor name cannot be an empty string."),
        (
            "pb_utils.InferenceRequest('x', ['y'], []).get_response_sender()",
            "Only a request that was given to 'execute' has a response sender.",
        ),
        ("pb_utils.MetricFamily('a', 'b', 3)", "Failed to create the metric family 'a': unknown kind 3"),
    ],
)
async def test_what_goes_wrong_in_execute_is_told(load: Load, statement: str, text: str) -> None:
    instance = await load(f"""
        import sys

        class TritonPythonModel:
            def execute(self, requests):
                {statement}
    """)
    (answer,) = await instance.execute_requests([request(numbers(1))])
    assert text in error_of(answer).message


async def test_execute_may_be_a_coroutine(load: Load) -> None:
    instance = await load("""
        import asyncio

        class TritonPythonModel:
            async def execute(self, requests):
                await asyncio.sleep(0)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones(1, np.float32))]) for _ in requests]
    """)
    (answer,) = await instance.execute_requests([request(numbers(1))])
    assert answer.outputs[0].array().tolist() == [1]


# -- loading -----------------------------------------------------------------------------------------------------------


async def test_initialize_gets_strings_and_siblings_can_be_imported(load: Load, tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "beside.py").write_text("ANSWER = 42\n")
    instance = await load("""
        import json
        import os
        import beside
        from .beside import ANSWER

        class TritonPythonModel:
            def initialize(self, args):
                facts = {"args": args, "strings": all(type(v) is str for v in args.values()), "answer": beside.ANSWER,
                         "relative": ANSWER, "directory": pb_utils.get_model_dir(), "cwd": os.getcwd()}
                self.facts = np.array([json.dumps(facts)], dtype=np.object_)
            def execute(self, requests):
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.facts)]) for _ in requests]
    """)
    (answer,) = await instance.execute_requests([request(numbers(1))])
    facts = json.loads(answer.outputs[0].array()[0])
    config = json.loads(facts["args"].pop("model_config"))
    assert facts["args"] == {
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
        "model_instance_name": "m_0_0",
        "model_repository": str(tmp_path / "m"),
        "model_version": "1",
        "model_name": "m",
    }
    assert config["max_batch_size"] == 8
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert facts["strings"]
    assert (facts["answer"], facts["relative"]) == (42, 42)
    assert facts["directory"] == str(tmp_path / "m" / "1")
    assert facts["cwd"] == os.getcwd()
    assert not (tmp_path / "m" / "1" / "__pycache__").exists()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            """
            class TritonPythonModel:
                def initialize(self, args):
                    raise pb_utils.TritonModelException("no weights")
            """,
            "TritonModelException: no weights\n\nAt:\n  {path}(6): initialize\n",
        ),
        (
            "import no_such_module",
            "ModuleNotFoundError: No module named 'no_such_module'\n\nAt:\n  {path}(3): <module>\n",
        ),
        ("x = 1", "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"),
        ("def broken(:", "SyntaxError: invalid syntax (model.py, line 3)"),
    ],
)
async def test_a_failed_load_gives_the_reason(load: Load, tmp_path: Path, code: str, text: str) -> None:
    with pytest.raises(InternalError) as raised:
        await load(code)
    assert raised.value.message == text.format(path=tmp_path / "m" / "1" / "model.py")


async def test_a_process_that_dies_while_loading_leaves_its_last_words(load: Load) -> None:
    with pytest.raises(InternalError) as raised:
        await load("""
            import os

            class TritonPythonModel:
                def initialize(self, args):
                    print("half way there", flush=True)
                    os._exit(9)
        """)
    assert raised.value.message.startswith("Stub process 'm_0_0' is not healthy. The process (pid ")
    assert raised.value.message.endswith(" exited with code 9. Its last lines:\nhalf way there")


async def test_a_load_that_takes_too_long_is_ended(load: Load) -> None:
    code = """
        import time

        class TritonPythonModel:
            def initialize(self, args):
                time.sleep(1000)
    """
    with pytest.raises(InternalError, match=r"was killed: it ran longer than 0\.5 s \(charonia\.max_load_s\)"):
        await load(code, IDENTITY + ' parameters { key: "charonia.max_load_s" value { string_value: "0.5" } }')


async def test_a_process_that_does_not_start_in_time_is_ended(load: Load) -> None:
    with pytest.raises(InternalError, match=r"it did not start within 0\.001 s \(stub-timeout-seconds\)"):
        await load(ECHO, stub_timeout_seconds="0.001")


async def test_settings_of_later_issues_are_refused_in_words(load: Load) -> None:
    with pytest.raises(InvalidArgument, match="shm-default-byte-size can't be smaller than 4 MiBs"):
        await load(ECHO, shm_default_byte_size="1000")


# -- auto-complete -----------------------------------------------------------------------------------------------------


async def test_auto_complete_fills_what_is_open(tmp_path: Path) -> None:
    model = source(
        tmp_path,
        """
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                assert config.as_dict()["name"] == "m"
                config.set_max_batch_size(8)
                config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [4], "optional": True})
                config.add_output({"name": "OUT", "data_type": "TYPE_STRING", "dims": [-1]})
                config.set_dynamic_batching()
                config.set_model_transaction_policy({"decoupled": False})
                return config
        """,
        'input { name: "IN" data_type: TYPE_FP32 }',
    )
    done = await PythonBackend().probe(model)
    assert done is not None
    assert [(tensor.name, list(tensor.dims), tensor.optional) for tensor in done.input] == [("IN", [4], True)]
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in done.output] == [("OUT", 13, [-1])]
    assert done.HasField("dynamic_batching")
    assert (done.max_batch_size, done.backend) == (8, "python")


async def test_a_model_without_auto_complete_completes_nothing(tmp_path: Path) -> None:
    assert await PythonBackend().probe(source(tmp_path, ECHO)) is None


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        (
            'config.add_input({"name": "IN", "data_type": "TYPE_INT8", "dims": [-1]})',
            "ValueError: unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'IN', model "
            "provides TYPE_INT8\n\nAt:\n",
        ),
        (
            'config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [3]})',
            "ValueError: model 'm', tensor 'OUT': the model expects dims [3] but the model configuration specifies "
            "dims [-1]",
        ),
        (
            "config.set_max_batch_size(4)",
            "ValueError: configuration specified max_batch_size 8, but in auto-complete-config function for model 'm' "
            "specified max_batch_size 4",
        ),
        (
            'config.add_input({"name": "X", "data_type": "TYPE_INT8", "dims": [1], "shape": 1})',
            "ValueError: input 'X' in auto-complete-config function for model 'm' contains property other than 'name', "
            "'data_type', 'dims' and 'optional'.",
        ),
        (
            'config.add_input({"data_type": "TYPE_INT8"})',
            "ValueError: input in auto-complete-config function for model 'm' is missing 'name' property.",
        ),
        (
            'config.add_output({"name": "X", "data_type": "TYPE_INT8"})',
            "ValueError: output 'X' in auto-complete-config function for model 'm' is missing 'dims' property.",
        ),
        ("return None", "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object."),
    ],
)
async def test_conflicts_in_auto_complete_are_told(tmp_path: Path, statement: str, text: str) -> None:
    model = source(
        tmp_path,
        f"""
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                {statement}
                return config
        """,
    )
    with pytest.raises(InternalError) as raised:
        await PythonBackend().probe(model)
    assert raised.value.message.startswith(text)


# -- output and logs ---------------------------------------------------------------------------------------------------


async def test_prints_and_log_lines_reach_the_executor(
    load: Load, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "charonia.model.m")
    instance = await load("""
        import sys

        class TritonPythonModel:
            def initialize(self, args):
                print("to stdout")
                print("to stderr", file=sys.stderr)
                pb_utils.Logger.log_info("information")
                pb_utils.Logger.log_warn("a warning")
                pb_utils.Logger.log("an error", pb_utils.Logger.ERROR)
                pb_utils.Logger.log_verbose("details")
            def finalize(self):
                print("finalized", end="")
    """)
    await instance.close_instance()
    assert capfd.readouterr().err == "[m/m_0_0] to stdout\n[m/m_0_0] to stderr\n[m/m_0_0] finalized\n"
    records = [record for record in caplog.records if record.name == "charonia.model.m"]
    assert [(record.levelname, record.message) for record in records] == [
        ("INFO", "information (model.py:10, m_0_0)"),
        ("WARNING", "a warning (model.py:11, m_0_0)"),
        ("ERROR", "an error (model.py:12, m_0_0)"),
        ("DEBUG", "details (model.py:13, m_0_0)"),
    ]


# -- death and hanging -------------------------------------------------------------------------------------------------

FRAGILE = """
    import ctypes, os, signal, sys, time

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
                os.write(int(sys.argv[2]), b"x" * 100)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones(1, np.float32))]) for _ in requests]
"""
ONE_SECOND = IDENTITY + ' parameters { key: "charonia.max_execution_s" value { string_value: "1" } }'


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
    victim, neighbour = await load(FRAGILE, ONE_SECOND), await load(FRAGILE, name="m_0_1")
    calls = [victim.execute_requests([request(numbers(1), id=text)]) for text in (what, "after")]
    async with asyncio.timeout(20):
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        (healthy,) = await neighbour.execute_requests([request(numbers(1))])
    assert isinstance(first, InstanceDied)
    assert isinstance(second, InstanceDied)
    assert str(first).startswith("Stub process 'm_0_0' is not healthy. The process (pid ")
    assert reason in str(first)
    assert last_words in first.stderr
    assert gone(victim.pid)
    assert healthy.error is None
    with pytest.raises(InstanceDied, match="is not healthy"):
        await victim.execute_requests([request(numbers(1))])


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
    monkeypatch.setattr("executors.backends.python.limits.FINALIZE_S", 0.2)
    instance = await load("""
        import time

        class TritonPythonModel:
            def finalize(self):
                time.sleep(1000)
    """)
    async with asyncio.timeout(10):
        await instance.close_instance()
    assert gone(instance.pid)


async def test_a_forked_child_of_the_model_does_not_keep_it_alive(load: Load) -> None:
    instance = await load("""
        import os, time

        class TritonPythonModel:
            def execute(self, requests):
                if os.fork() == 0:
                    time.sleep(15)
                    os._exit(0)
                os._exit(4)
    """)
    async with asyncio.timeout(10):
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
    instance = await PythonBackend().create_instance(InstanceSpec("m_0", "CPU", -1, source, ModelInterface.of(config)))
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
    async with asyncio.timeout(30):
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
            await asyncio.sleep(0)
    with pytest.raises(InstanceDied) as raised:
        await instance.execute_requests([request(numbers(1))])
    assert raised.value.blameless


# -- health ------------------------------------------------------------------------------------------------------------

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
