"""`charonia check` on real repositories: it refuses what a load refuses, says where and why, and mends what is safe."""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any, Never

import pytest
from onnx import TensorProto, helper
from trtllm_configs import engine_config, ensemble_config

from charonia.backend import Backend, ModelSource
from charonia.errors import CharoniaError
from executors.backends import registry
from executors.backends.registry import BackendRegistry
from executors.checking import repository_check
from executors.checking.offline_models import OfflineModels
from executors.checking.repository_check import RepositoryReport, check_repository
from executors.repository.model_repository import ModelRepository

EXAMPLES = Path(__file__).resolve().parents[4] / "examples" / "models"
ONNX = """backend: "onnxruntime"
max_batch_size: 8
input [ { name: "a" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "c" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
PYTHON = """backend: "python"
input [ { name: "a" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "c" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
TENSOR = 'input [ { name: "a" data_type: TYPE_FP32 dims: [ 0 ] } ]'
CODE = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
ENSEMBLE = """platform: "ensemble"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling { step [ { model_name: "part" model_version: -1
  input_map { key: "a" value: "x" } output_map { key: "c" value: "y" } } ] }
"""


def graph() -> bytes:
    made = helper.make_graph(
        [helper.make_node("Identity", ["a"], ["c"])],
        "g",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, ("n", 4))],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT, ("n", 4))],
    )
    return bytes(
        helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
    )


def archive(*names: str) -> bytes:
    """A zip archive as PyTorch writes them, with one folder at its root."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name in names:
            made.writestr(f"model/{name}", b"")
    return buffer.getvalue()


def build(root: Path, models: dict[str, dict[str, str]]) -> Path:
    """Models by name: file to content. "onnx" stands for the graph above."""
    for name, files in models.items():
        for file, content in files.items():
            path = root / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(graph() if content == "onnx" else content.encode())
        (root / name).mkdir(parents=True, exist_ok=True)
    return root


def onnx_model(config: str) -> dict[str, dict[str, str]]:
    return {"m": {"config.pbtxt": config, "1/model.onnx": "onnx"}}


def python_model(config: str, code: str = CODE) -> dict[str, dict[str, str]]:
    return {"m": {"config.pbtxt": config, "1/model.py": code}}


async def loads(root: Path) -> dict[str, bool]:
    """Which models an executor loads, with its real backends."""
    repository = ModelRepository([root])
    models = OfflineModels(repository, 0, backends=BackendRegistry())  # type: ignore[arg-type]
    found = {}
    for name in models.directories:
        try:
            await models.load(name, None)
            found[name] = True
        except CharoniaError:
            found[name] = False
    repository.close()
    return found


async def checked(root: Path, **options: Any) -> RepositoryReport:
    return await check_repository(root, gpus=0, **options)


GOOD = {
    "onnx": onnx_model(ONNX),
    "no configuration": {"m": {"1/model.onnx": "onnx"}},
    "no tensors": onnx_model('backend: "onnxruntime"'),
    "python": python_model(PYTHON),
    "ensemble": {"part": onnx_model(ONNX)["m"], "whole": {"config.pbtxt": ENSEMBLE, "1/.keep": ""}},
    "python completes itself": python_model(
        'backend: "python"',
        CODE + "    @staticmethod\n    def auto_complete_config(config):\n"
        "        config.add_input({'name': 'a', 'data_type': 'TYPE_FP32', 'dims': [4]})\n"
        "        config.add_output({'name': 'c', 'data_type': 'TYPE_FP32', 'dims': [4]})\n"
        "        config.set_max_batch_size(0)\n        return config\n",
    ),
}  # fmt: skip
BAD = {
    "misspelt field": (onnx_model(ONNX.replace("max_batch_size", "max_batchsize")), (2, "max_batchsize")),
    "misspelt value": (onnx_model(ONNX.replace("TYPE_FP32", "FP32", 1)), (3, "input.data_type")),
    "wrong name": (onnx_model('name: "n"\n' + ONNX), (1, "name")),
    "dims of another file": (onnx_model(ONNX.replace("[ 4 ]", "[ 5 ]", 1)), (3, "input[0].dims")),
    "type of another file": (onnx_model(ONNX.replace("TYPE_FP32", "TYPE_INT8", 1)), (3, "input[0].data_type")),
    "no such tensor": (onnx_model(ONNX.replace('"c"', '"d"')), (4, "output[0].name")),
    "no version": ({"m": {"config.pbtxt": ONNX, "model.onnx": "onnx"}}, (1, "version_policy")),
    "negative size": (onnx_model(ONNX.replace("8", "-8")), (2, "max_batch_size")),
    "preferred size": (
        onnx_model(ONNX + "dynamic_batching {\n preferred_batch_size: [ 9 ] }"),
        (6, "dynamic_batching.preferred_batch_size"),
    ),
    "GPU": (onnx_model(ONNX + "instance_group [ {\n kind: KIND_GPU } ]"), (6, "instance_group.kind")),
    "label file": (
        onnx_model(ONNX.replace("] } ]\n", "] label_filename: \"l\" } ]\n").replace(' label_filename: "l"', "", 1)),
        (4, "output[0].label_filename"),
    ),
    "syntax": (onnx_model(ONNX + "output {"), (5, "output")),
    "backend": (onnx_model(ONNX.replace("onnxruntime", "onnx")), (1, "backend")),
    "no class": (python_model(PYTHON, "x = 1\n"), (0, "")),
    "no graph": ({"m": {"config.pbtxt": ONNX, "1/model.onnx": "nonsense"}}, (0, "")),
    "control values": (
        python_model(PYTHON + "sequence_batching {\n control_input [ { name: \"S\"\n"
                     " control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0 ] } ] } ] }"),
        (5, "sequence_batching.control_input"),
    ),
    "control that is an input": (
        python_model(PYTHON + "sequence_batching {\n control_input { name: \"s\" control { kind:"
                     " CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }\n control_input { name: \"a\" control {"
                     " kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } }"),
        (6, "sequence_batching.control_input[1]"),
    ),
    "state": (
        python_model(PYTHON + "sequence_batching {\n state { input_name: \"s\" output_name: \"t\" dims: [ 1 ] } }"),
        (5, "sequence_batching.state[0]"),
    ),
    "no Python": (python_model(PYTHON, "x = 1\ndef f(:\n"), (2, "")),
    "python dims": (python_model(PYTHON.replace(" dims: [ 4 ]", "", 1)), (2, "input[0].dims")),
    "step": (
        {"whole": {"config.pbtxt": ENSEMBLE.replace('"part"', '"other"'), "1/.keep": ""}},
        (5, "ensemble_scheduling.step"),
    ),
    "warm-up": (
        onnx_model(ONNX + 'model_warmup { name: "w" inputs { key: "a" value { data_type: TYPE_FP32\n'
                   ' dims: [ 4 ] input_data_file: "f" } } }'), (5, "model_warmup")),
    "parameter": (
        onnx_model(ONNX + 'parameters { key: "charonia.repeatable"\n value { string_value: "perhaps" } }'),
        (5, 'parameters["charonia.repeatable"]'),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
async def test_what_it_passes_loads(name: str, tmp_path: Path) -> None:
    build(tmp_path, GOOD[name])
    assert (await checked(tmp_path)).faults == []
    assert all((await loads(tmp_path)).values())


@pytest.mark.parametrize("name", BAD)
async def test_what_it_refuses_does_not_load_and_it_says_where(name: str, tmp_path: Path) -> None:
    models, place = BAD[name]
    build(tmp_path, models)
    report = await checked(tmp_path)
    first = report.faults[0]
    assert (first.place.line, first.place.field) == place
    assert first.expected
    assert first.instead
    assert (tmp_path / first.file).exists()
    refused = {fault.model for fault in report.faults}
    assert refused == {model for model, loaded in (await loads(tmp_path)).items() if not loaded}


async def test_a_file_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    build(tmp_path, {"m": {"1/model.onnx": "nonsense"}})
    (fault,) = (await checked(tmp_path)).faults
    assert (fault.file, fault.expected) == ("m/1/model.onnx", "a file that its backend can load")


@pytest.mark.parametrize("repository", ["plain", "with spaces, and: others"])
async def test_a_file_whose_path_has_spaces_is_named(repository: str, tmp_path: Path) -> None:
    written = {"config.pbtxt": f'{ONNX}default_model_filename: "my model.onnx"\n', "1/my model.onnx": "no graph"}
    report = await checked(build(tmp_path / repository, {"m": written}))
    (fault,) = report.faults
    assert fault.file == "m/1/my model.onnx", fault
    assert fault.expected == "a file that its backend can load"


TORCH = PYTHON.replace('"python"', '"pytorch"')
AUTOCAST = TORCH + 'parameters { key: "charonia.autocast" value: { string_value: "fp8" } }'
TORCH_FAULTS: dict[str, tuple[str, bytes, str, str]] = {
    "no archive": (TORCH, b"no archive", "'model.pt' is no archive", "m/1/model.pt"),
    "weights alone": (TORCH, archive("data.pkl"), "holds weights and no model", "m/1/model.pt"),
    "no input": (
        TORCH.replace("input [", "output ["), archive("code/__torch__.py"), "at least one input", "m/config.pbtxt",
    ),
    "a wrong parameter": (AUTOCAST, archive("code/__torch__.py"), "must be bf16 or fp16", "m/config.pbtxt"),
    "half an exported program": (TORCH, archive("models/model.json"), "cannot be read", "m/1/model.pt"),
}  # fmt: skip


def install_torch(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    """Have torch be found, or not, whether this machine has it or not."""
    monkeypatch.setattr(registry, "_importable", lambda module: installed or module not in ("torch", "safetensors"))


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("name", TORCH_FAULTS)
async def test_what_torch_is_not_needed_to_see_in_its_files_is_a_fault(
    name: str, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_torch(monkeypatch, installed)
    config, content, problem, file = TORCH_FAULTS[name]
    build(tmp_path, {"m": {"config.pbtxt": config}})
    (tmp_path / "m/1").mkdir()
    (tmp_path / "m/1/model.pt").write_bytes(content)
    (fault,) = (await checked(tmp_path)).faults
    assert problem in fault.problem
    assert fault.file == file


@pytest.mark.parametrize(
    ("installed", "said"),
    [(True, "what its library makes of it is not checked"), (False, "the library of pytorch is not installed here")],
)
async def test_a_torchscript_that_only_torch_can_load_has_a_note(
    installed: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_torch(monkeypatch, installed)
    build(tmp_path, {"m": {"config.pbtxt": TORCH}, "missing": {"config.pbtxt": TORCH, "1/other.pt": ""}})
    (tmp_path / "m/1").mkdir()
    (tmp_path / "m/1/model.pt").write_bytes(archive("code/__torch__.py", "data.pkl"))
    report = await checked(tmp_path)
    assert [fault.model for fault in report.faults] == ["missing"]
    assert "unable to find" in report.faults[0].problem
    assert [(note.model, note.text) for note in report.notes] == [("m", f"its file was read, not loaded: {said}")]


async def test_a_model_with_an_environment_of_its_own_is_read_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_torch(monkeypatch, False)
    environment = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/none" } }'
    build(tmp_path, {"m": {"config.pbtxt": f"{TORCH}{environment}"}})
    (tmp_path / "m/1").mkdir()
    (tmp_path / "m/1/model.pt").write_bytes(archive("code/__torch__.py", "data.pkl"))
    assert not (await checked(tmp_path)).faults


async def test_without_torch_a_python_based_backend_of_the_name_takes_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_torch(monkeypatch, False)
    build(tmp_path / "backends", {"pytorch": {"model.py": CODE}})
    build(tmp_path / "models", {"m": {"config.pbtxt": TORCH, "1/model.pt": "no archive"}})
    assert not (await check_repository(tmp_path / "models", gpus=0, backend_directory=f"{tmp_path}/backends")).faults


async def test_a_stray_configuration_hides_no_other_note(tmp_path: Path) -> None:
    build(tmp_path, {"m": {"config.pbtxt": ONNX, "1/model.onnx": "onnx"}, " ": {}})
    (tmp_path / "config.pbtxt").write_text(ONNX)
    (tmp_path / "model.onnx").write_bytes(graph())
    notes = [note.text for note in (await checked(tmp_path)).notes if not note.model]
    no_part = "is no directory, and no part of the repository"
    assert notes == [f"'config.pbtxt' {no_part}", f"'model.onnx' {no_part}", "' ' cannot be a model's name"]


async def test_a_models_directory_is_no_repository(tmp_path: Path) -> None:
    build(tmp_path, onnx_model(ONNX))
    (note,) = [note.text for note in (await checked(tmp_path / "m")).notes if "lies here" in note.text]
    assert note.endswith(f"check its repository, '{tmp_path}'")


@pytest.mark.parametrize("also", ["", "dynamic_batching { preferred_batch_size: [ 9 ] }"])
async def test_a_parameter_that_nothing_reads_is_noted(also: str, tmp_path: Path) -> None:
    key = 'parameters { key: "charonia.max_exection_s" value { string_value: "2" } }\n'
    build(tmp_path, onnx_model(ONNX + key + also))
    report = await checked(tmp_path)
    assert len(report.faults) == bool(also)
    (note,) = [note.text for note in report.notes if "charonia." in note.text]
    assert "'charonia.max_exection_s' is not known" in note
    assert all((await loads(tmp_path)).values()) is not bool(also)


async def test_one_run_names_faults_that_lie_behind_one_another(tmp_path: Path) -> None:
    text = ONNX.replace("max_batch_size", "max_batchsize").replace("TYPE_FP32", "TYPE_FLOAT32", 1)
    text = 'name: "n"\n' + text.replace('"c" data_type: TYPE_FP32 dims: [ 4 ]', '"c" data_type: TYPE_INT8 dims: [ 0 ]')
    build(tmp_path, onnx_model(text + "dynamic_batching { priority_levels: 2 }\nresponse_cach { enable: true }\n"))
    report = await checked(tmp_path)
    found = {(fault.place.line, fault.place.field): fault.instead for fault in report.faults}
    assert found[(3, "max_batchsize")] == "max_batch_size"
    assert found[(4, "input.data_type")] == "TYPE_FP32"
    assert found[(7, "response_cach")] == "response_cache"
    assert found[(1, "name")] == '"m"'
    assert (6, "dynamic_batching.default_priority_level") in found
    assert (5, "output[0].dims") in found


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            'platform: "nonsense"\nmax_batch_size: -2\n' + TENSOR,
            {"unexpected platform type 'nonsense'", "'max_batch_size' must be", "model input 'a' dimension must be"},
        ),
        (
            'platform: "ensemble"\nmax_batch_size: -2\nensemble_scheduling { step { model_name: "b" } }\n' + TENSOR,
            {"'max_batch_size' must be", "must specify 'input_map'", "model input 'a' dimension must be"},
        ),
        (
            PYTHON
            + """max_batch_size: 2
sequence_batching { state { input_name: "s" } }
parameters { key: "charonia.checkpoint_every" value { string_value: "x" } }
parameters { key: "charonia.record_share" value { string_value: "y" } }
model_warmup { name: "one" batch_size: 4 }
model_warmup { name: "two" batch_size: 1 inputs { key: "b" value { data_type: TYPE_FP32 } } }
""",
            {
                "sequence batching state must have",
                "parameter 'charonia.checkpoint_every'",
                "parameter 'charonia.record_share'",
                "model warmup 'one' of model 'm' has batch size 4",
                "unexpected inference input 'b'",
            },
        ),
    ],
    ids=["platform", "ensemble", "sequences"],
)
async def test_each_rule_of_a_load_is_tried(text: str, problems: set[str], tmp_path: Path) -> None:
    build(tmp_path, python_model(text))
    found = [fault.problem for fault in (await checked(tmp_path)).faults]
    assert len(found) == len(problems), found
    assert all(any(problem in one for one in found) for problem in problems), found


async def test_the_further_rules_know_the_backend_of_the_files(tmp_path: Path) -> None:
    accelerator = 'cpu_execution_accelerator: [ { name: "openvino" } ]'
    text = ONNX.removeprefix('backend: "onnxruntime"\n').replace("[ 4 ]", "[ 5 ]", 1)
    text += f"optimization {{ execution_accelerators {{ {accelerator} }} }}\n"
    build(tmp_path, onnx_model(text + 'instance_group { profile: "0" }\n'))
    found = [fault.problem for fault in (await checked(tmp_path)).faults]
    assert len(found) == 2, found
    assert not any("not supported yet" in problem for problem in found), found


CHAIN = """platform: "ensemble"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling { step [ { model_name: "MODEL" model_version: -1
  input_map { key: "IN" value: "x" } output_map { key: "OUT" value: "y" } } ] }
"""
COMPLETES = CODE + "    @staticmethod\n    def auto_complete_config(config):\n        return config\n"


@pytest.mark.parametrize(
    ("text", "code", "decided"),
    [
        ('backend: "unread"', "", False),  # its file has tensors that are not read here
        ('backend: "unread" output { name: "OUT" }', "", False),  # refused, which its file may change
        (ONNX.replace("onnxruntime", "unread"), "", True),
        ('backend: "python"', COMPLETES, False),
        ('backend: "python"', CODE, True),
        ('backend: "nowhere"', "", True),
    ],
)
async def test_an_ensemble_of_models_that_are_completed_at_load_is_not_decided(
    text: str, code: str, decided: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unread(Backend):
        name = "unread"

        async def load(self, source: ModelSource) -> Never:
            raise AssertionError("it was opened")

    had = BackendRegistry.has
    monkeypatch.setattr(BackendRegistry, "has", lambda registry, name: name == "unread" or had(registry, name))
    get = BackendRegistry.get
    monkeypatch.setattr(BackendRegistry, "get", lambda self, name: Unread() if name == "unread" else get(self, name))
    part = {"config.pbtxt": text, "1/model.py" if code else "1/model.bin": code}
    whole = {"config.pbtxt": CHAIN.replace("MODEL", "part"), "1/.keep": ""}
    outer = {
        "config.pbtxt": CHAIN.replace("MODEL", "whole").replace('"IN"', '"x"').replace('"OUT"', '"y"'),
        "1/.keep": "",
    }
    build(tmp_path, {"outer": outer, "part": part, "whole": whole})
    report = await checked(tmp_path)
    refused = {fault.model for fault in report.faults} - {"part"}
    undecided = {note.model for note in report.notes if "not decided: loading" in note.text}
    assert (refused, undecided) == (({"outer", "whole"}, set()) if decided else (set(), {"outer", "whole"}))


async def test_a_fault_of_a_step_that_is_known_is_a_fault_beside_one_that_is_completed_at_load(tmp_path: Path) -> None:
    late = ONNX.replace("onnxruntime", "python").replace('"c"', '"d"')
    maps = 'input_map { key: "none" value: "x" } output_map { key: "c" value: "z" }'
    first = f'step [ {{ model_name: "m" model_version: -1 {maps} }}, '
    text = ENSEMBLE.replace('key: "a" value: "x"', 'key: "a" value: "z"').replace("step [ ", first)
    models = {"whole": {"config.pbtxt": text, "1/.keep": ""}, "part": {"config.pbtxt": late, "1/model.py": COMPLETES}}
    build(tmp_path, {**models, **onnx_model(ONNX)})
    report = await checked(tmp_path)
    assert [one.model for one in report.faults] == ["whole"], report.notes
    assert "non-existing input none in model m" in report.faults[0].problem
    build(tmp_path, {"whole": {"config.pbtxt": text.replace("none", "a")}})
    report = await checked(tmp_path)
    told = ["not decided: loading part" in note.text for note in report.notes if note.model == "whole"]
    assert (report.faults, told) == ([], [True])


async def test_ensembles_in_a_circle_are_faults(tmp_path: Path) -> None:
    models = {"a": "b", "b": "a"}
    build(tmp_path, {name: {"config.pbtxt": CHAIN.replace("MODEL", of), "1/.keep": ""} for name, of in models.items()})
    assert {fault.model for fault in (await checked(tmp_path)).faults} == {"a", "b"}


async def test_fix_writes_what_is_safe_and_keeps_the_file_as_it_was(tmp_path: Path) -> None:
    broken = ONNX.replace("max_batch_size", "max_batchsize").replace("[ 4 ]", "[ 5,\n 6 ]", 1)
    build(tmp_path, onnx_model('name: "other"\n' + broken))
    build(tmp_path, {"lone": {"config.pbtxt": ONNX, "model.onnx": "onnx"}})
    report = await checked(tmp_path, fix=True)
    assert report.faults == []
    assert (tmp_path / "m" / "config.pbtxt~").read_text() == 'name: "other"\n' + broken
    assert {"-max_batchsize: 8", "+max_batch_size: 8", '+name: "m"'} <= set(report.diffs[0].splitlines())
    assert (tmp_path / "lone/1/model.onnx").is_file()
    assert await loads(tmp_path) == {"m": True, "lone": True}


@pytest.mark.parametrize(
    "text",
    [
        ONNX.replace("TYPE_FP32", "TYPE_INT3", 1),  # INT32 and INT8 are both near
        ONNX + "zzz: 1",
        ONNX + "dynamic_batching { preferred_batch_size: [ 9 ] }",
        ONNX.replace('"c"', '"d"'),
        ONNX.replace("dims: [ 4 ]", "dims: [ 5 ] reshape { shape: [ 5 ] }", 1),
        ONNX + "max_batch_size: 4",
    ],
)
async def test_fix_leaves_what_could_mean_several_things(text: str, tmp_path: Path) -> None:
    build(tmp_path, onnx_model(text))
    report = await checked(tmp_path, fix=True)
    assert report.faults
    assert not any(fault.correction for fault in report.faults)
    assert report.fixed == []
    assert (tmp_path / "m/config.pbtxt").read_text() == text
    assert not (tmp_path / "m/config.pbtxt~").exists()


async def test_fix_refuses_a_file_that_changed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, onnx_model('name: "n"\n' + ONNX))
    write = repository_check._write

    def change_first(*arguments: Any) -> None:
        (tmp_path / "m/config.pbtxt").write_text("# mine\n" + ONNX)
        write(*arguments)

    monkeypatch.setattr(repository_check, "_write", change_first)
    report = await checked(tmp_path, fix=True)
    assert any("changed meanwhile" in note.text for note in report.notes)
    assert report.fixed == []
    assert (tmp_path / "m/config.pbtxt").read_text() == "# mine\n" + ONNX


async def test_fix_leaves_links_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    build(tmp_path / "models", {"m": {"1/model.onnx": "onnx"}, "n": {"1/model.onnx": "onnx"}})
    (tmp_path / "shared.pbtxt").write_text('name: "other"')
    (tmp_path / "models/m/config.pbtxt").symlink_to(tmp_path / "shared.pbtxt")
    report = await checked(tmp_path / "models", fix=True)
    assert any("is a link" in note.text for note in report.notes)
    (tmp_path / "models/m/config.pbtxt").unlink()
    (tmp_path / "models/n/config.pbtxt").write_bytes(b'name: "\xff"')
    report = await checked(tmp_path / "models", fix=True)
    assert [(fault.model, fault.correction) for fault in report.faults] == [("n", None)]
    assert (tmp_path / "models/n/config.pbtxt").read_bytes() == b'name: "\xff"'
    assert (tmp_path / "shared.pbtxt").read_text() == 'name: "other"'


async def test_what_cannot_be_written_keeps_nothing_else_from_it(tmp_path: Path) -> None:
    """A model that is linked into the repository is another's, also to correct."""
    build(tmp_path / "elsewhere", onnx_model('name: "n"\n' + ONNX))
    build(tmp_path / "models", onnx_model('name: "n"\n' + ONNX))
    (tmp_path / "models/a").symlink_to(tmp_path / "elsewhere/m")
    report = await checked(tmp_path / "models", fix=True)
    assert [line.split(";")[0] for line in report.fixed] == ["corrected m/config.pbtxt"]
    assert any("lies outside the repository" in note.text for note in report.notes)
    assert (tmp_path / "elsewhere/m/config.pbtxt").read_text() == 'name: "n"\n' + ONNX


async def test_files_without_end_and_names_of_any_bytes_are_faults(tmp_path: Path) -> None:
    labels = {"label": "label.txt", "nul": "a\\000b"}
    for name in ("pipe", "device", "label", "nul", "deep", "loop"):
        output = f'output {{ name: "B" data_type: TYPE_FP32 dims: [ 1 ] label_filename: "{labels.get(name, "")}" }}'
        config = 'backend: "python" input { name: "A" data_type: TYPE_FP32 dims: [ 1 ] } ' + output
        build(tmp_path, {name: {"config.pbtxt": config, "1/model.py": "class TritonPythonModel: pass"}})
    for name in ("pipe", "device", "loop"):
        (tmp_path / name / "config.pbtxt").unlink()
    (tmp_path / "loop/config.pbtxt").symlink_to("config.pbtxt")
    os.mkfifo(tmp_path / "pipe/config.pbtxt")
    (tmp_path / "device/config.pbtxt").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "label/label.txt")
    (tmp_path / "deep/1/model.py").write_text("-" * 200_000 + "1")
    os.mkdir(os.fsencode(tmp_path) + b"/\xff")
    report = await checked(tmp_path)
    assert {fault.model for fault in report.faults} == {"pipe", "device", "label", "nul", "deep", "loop"}
    assert any(note.text.endswith("cannot be a model's name") for note in report.notes)


async def test_earlier_backups_stay(tmp_path: Path) -> None:
    for name in ("n", "o"):
        build(tmp_path, onnx_model(f'name: "{name}"\n' + ONNX))
        assert (await checked(tmp_path, fix=True)).faults == []
    kept = [(tmp_path / "m" / file).read_text()[:9] for file in ("config.pbtxt~", "config.pbtxt.2~")]
    assert kept == ['name: "n"', 'name: "o"']


async def test_no_code_of_a_model_runs(tmp_path: Path) -> None:
    build(tmp_path, python_model(PYTHON, f"open({str(tmp_path / 'ran')!r}, 'w')\n" + CODE))
    report = await checked(tmp_path)
    assert report.faults == []
    assert [note.model for note in report.notes] == ["m"]
    assert not (tmp_path / "ran").exists()
    await loads(tmp_path)
    assert (tmp_path / "ran").exists()  # a load does run it


async def test_a_configuration_for_another_machine(tmp_path: Path) -> None:
    build(tmp_path, onnx_model(ONNX + "instance_group [ { kind: KIND_GPU gpus: [ 1 ] } ]"))
    assert "gpu id 1" in (await checked(tmp_path)).faults[0].problem
    assert (await check_repository(tmp_path, gpus=2, assumed_gpus=True)).faults == []
    assert "gpu id 1" in (await check_repository(tmp_path, gpus=1, assumed_gpus=True)).faults[0].problem


async def test_progress_counts_all_models(tmp_path: Path) -> None:
    for number in range(5):
        build(tmp_path, {f"m{number}": {"1/model.onnx": "onnx"}})
    seen: list[tuple[int, int]] = []
    await checked(tmp_path, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(number, 5) for number in range(1, 6)]


async def test_the_example_models_have_no_fault(tmp_path: Path) -> None:
    if not (EXAMPLES / "identity").is_dir():
        pytest.skip("the example models are not built")
    shutil.copytree(EXAMPLES, tmp_path / "models")
    report = await checked(tmp_path / "models")
    assert report.faults == []
    assert report.models >= 10


async def test_filled_in_templates_of_tensorrt_llm_have_no_faults_but_the_backend(tmp_path: Path) -> None:
    """All their tensors and parameters are read; where its backend is not, the fault names a page."""
    models = {"tensorrt_llm": engine_config(language_model="text"), "ensemble": ensemble_config()}
    build(tmp_path, {name: {"config.pbtxt": config, "1/.keep": ""} for name, config in models.items()})
    faults = {fault.model: fault for fault in (await checked(tmp_path)).faults}
    assert (faults["tensorrt_llm"].place.line, faults["tensorrt_llm"].place.field) == (2, "backend")
    for fault in faults.values():  # the ensemble needs the other
        assert "docs/howto/tensorrt-llm.md says how its tensors are served" in fault.problem
    backends = EXAMPLES.parent / "tensorrt_llm" / "backends"
    report = await checked(tmp_path, backend_directory=str(backends))
    assert report.faults == []
    assert report.models == 2
