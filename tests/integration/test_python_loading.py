"""Python models as they are loaded and completed, and what they print and log, in real model processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from backend_calls import signature_of
from python_instances import ECHO, IDENTITY, Load, numbers, request, source

from charonia.errors import InternalError, InvalidArgument
from executors.backends.python import PythonBackend

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
    async def tried() -> None:
        for _ in range(5):  # where the machine stands still meanwhile, the start is heard of before the time is over
            await load(ECHO, stub_timeout_seconds="0.001")

    with pytest.raises(InternalError, match=r"it did not start within 0\.001 s \(stub-timeout-seconds\)"):
        await tried()


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
                config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [4]})
                config.add_input({"name": "MORE", "data_type": "TYPE_FP32", "dims": [4], "optional": True})
                config.add_output({"name": "OUT", "data_type": "TYPE_STRING", "dims": [-1]})
                config.set_dynamic_batching()
                config.set_model_transaction_policy({"decoupled": False})
                return config
        """,
        'input { name: "IN" data_type: TYPE_FP32 }',
    )
    done = await signature_of(PythonBackend(), model)
    assert done is not None
    inputs = [(tensor.name, list(tensor.dims), tensor.optional) for tensor in done.input]
    assert inputs == [("IN", [4], False), ("MORE", [4], True)]
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in done.output] == [("OUT", 13, [-1])]
    assert done.HasField("dynamic_batching")
    assert (done.max_batch_size, done.backend) == (8, "python")


async def test_a_model_without_auto_complete_completes_nothing(tmp_path: Path) -> None:
    assert await signature_of(PythonBackend(), source(tmp_path, ECHO)) is None


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
        await signature_of(PythonBackend(), model)
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
