"""The onnxruntime backend on real graphs: signature, shared sessions, options, checks against the graph, running."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from backend_calls import instance_of, signature_of
from onnx import TensorProto, helper

from charonia.backend import (
    BatchInstance,
    InstanceSpec,
    Interrupted,
    InterruptibleInstance,
    ModelSource,
    TensorSignature,
)
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument, NotFound, Unsupported
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from executors.backends.model_files import model_path
from executors.backends.onnxruntime import OnnxRuntimeBackend
from executors.backends.registry import BackendRegistry
from executors.configuration.config import normalise

FLOAT = TensorProto.FLOAT


def save(path: Path, op: str = "Identity", element: int = FLOAT, dims: tuple[str | int, ...] = ("n", 4)) -> None:
    """A graph of one operator: inputs a (and b), output c."""
    names = ["a", "b"] if op == "Add" else ["a"]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["c"])],
        "g",
        [helper.make_tensor_value_info(name, element, dims) for name in names],
        [helper.make_tensor_value_info("c", element, dims)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)


def source(directory: Path, text: str, backend_config: dict[str, str] | None = None) -> ModelSource:
    config = normalise(parse(text + '\nname: "m" backend: "onnxruntime"'))
    return ModelSource("m", 1, directory, config, backend_config or {})


def spec(of: ModelSource, kind: str = "CPU", name: str = "m_0") -> InstanceSpec:
    return InstanceSpec(name, kind, -1 if kind == "CPU" else 0, of, ModelInterface.of(of.config))


CONFIG = """
max_batch_size: 8
input { name: "a" data_type: TYPE_FP32 dims: 4 }
output { name: "c" data_type: TYPE_FP32 dims: 4 }
"""


async def test_the_signature_has_names_types_and_dynamic_dims(tmp_path: Path) -> None:
    save(tmp_path / "1" / "model.onnx", "Add", dims=("n", 4, "width"))
    found = await signature_of(OnnxRuntimeBackend(), source(tmp_path, ""))
    assert found.inputs == (TensorSignature("a", "FP32", (-1, 4, -1)), TensorSignature("b", "FP32", (-1, 4, -1)))
    assert found.outputs == (TensorSignature("c", "FP32", (-1, 4, -1)),)


async def test_instances_of_one_load_share_one_session_and_a_reload_does_not(tmp_path: Path) -> None:
    save(tmp_path / "1" / "model.onnx")
    backend, of = OnnxRuntimeBackend(), source(tmp_path, CONFIG)
    model = await backend.load(of)
    first, second = await asyncio.gather(*(model.create_instance(spec(of)) for _ in range(2)))
    assert first.session is second.session
    again = await instance_of(backend, spec(of))
    assert again.session is not first.session
    first.close()
    session = weakref.ref(second.session)
    result = second.execute({"a": np.ones((2, 4), np.float32)}, ["c"])
    assert np.array_equal(result["c"], np.ones((2, 4), np.float32))
    await model.close()
    assert session() is not None
    second.close()
    async with asyncio.timeout(30):  # the memory is freed, once the thread that made the session lets go of it
        while session() is not None:
            await asyncio.sleep(0.01)
    again.close()


async def test_the_session_that_gave_the_signature_is_that_of_the_instances(tmp_path: Path) -> None:
    path = tmp_path / "1" / "model.onnx"
    save(path)
    of = source(tmp_path, CONFIG)
    model = await OnnxRuntimeBackend().load(of)
    await model.signature()
    ((_, opened),) = model._sessions.values()
    assert (await model.create_instance(spec(of))).session is opened.session
    save(path, "Neg")  # in between the file has become another
    instance = await model.create_instance(spec(of))
    assert instance.session is not opened.session
    assert instance.execute({"a": np.ones((1, 4), np.float32)}, ["c"])["c"][0, 0] == -1


@pytest.mark.parametrize("datatype", [t for t in DataType if t is not DataType.BYTES])
async def test_every_fixed_type_passes_through_unchanged(tmp_path: Path, datatype: DataType) -> None:
    element = {"FP32": "FLOAT", "FP64": "DOUBLE", "FP16": "FLOAT16", "BF16": "BFLOAT16"}.get(
        datatype.value, datatype.value
    )
    save(tmp_path / "1" / "model.onnx", element=TensorProto.DataType.Value(element))
    name = datatype.config_name
    of = source(
        tmp_path,
        f'max_batch_size: 8 input {{ name: "a" data_type: {name} dims: 4 }} '
        f'output {{ name: "c" data_type: {name} dims: 4 }}',
    )
    instance = await instance_of(OnnxRuntimeBackend(), spec(of))
    assert isinstance(instance, BatchInstance)
    array = np.array([[0, 1, 1, 0], [1, 0, 0, 1]]).astype(datatype.numpy)
    result = instance.execute({"a": array}, ["c"])["c"]
    assert result.dtype == datatype.numpy
    assert result.tobytes() == array.tobytes()


async def test_strings_are_text(tmp_path: Path) -> None:
    save(tmp_path / "1" / "model.onnx", element=TensorProto.STRING)
    of = source(
        tmp_path,
        'input { name: "a" data_type: TYPE_STRING dims: [-1, 4] } '
        'output { name: "c" data_type: TYPE_STRING dims: [-1, 4] }',
    )
    instance = await instance_of(OnnxRuntimeBackend(), spec(of))
    words = np.array([[b"a", b"", "Größe".encode(), b"x y"]], dtype=np.object_)
    assert instance.execute({"a": words}, ["c"])["c"].tolist() == [["a", "", "Größe", "x y"]]
    words[0, 0] = b"\xff"
    with pytest.raises(InvalidArgument, match="must be UTF-8 text"):
        instance.execute({"a": words}, ["c"])


async def test_a_run_that_fails_is_an_internal_error_with_the_reason(tmp_path: Path) -> None:
    save(tmp_path / "1" / "model.onnx", dims=("n", 4))
    instance = await instance_of(OnnxRuntimeBackend(), spec(source(tmp_path, CONFIG)))
    with pytest.raises(InternalError, match="Got invalid dimensions for input"):
        instance.execute({"a": np.ones((1, 5), np.float32)}, ["c"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CONFIG.replace('"a"', '"q"'), "unexpected inference input 'q', allowed inputs are: "),
        (CONFIG.replace('"c"', '"q"'), "unexpected inference output 'q', allowed outputs are: "),
        (CONFIG.replace("FP32", "INT32", 1), "configuration expects datatype TYPE_INT32 for input 'a'"),
        (CONFIG.replace("dims: 4", "dims: 5", 1), "model 'm', tensor 'a': the model expects 2 dimensions"),
        (CONFIG.replace("dims: 4", "dims: [4, 4]", 1), "model 'm', tensor 'a': the model expects 2 dimensions"),
    ],
)
async def test_a_configuration_that_contradicts_the_graph_is_refused(tmp_path: Path, text: str, message: str) -> None:
    save(tmp_path / "1" / "model.onnx")
    backend = OnnxRuntimeBackend()
    with pytest.raises(InvalidArgument, match=message.replace("[", r"\[")):
        await instance_of(backend, spec(source(tmp_path, text)))


async def test_a_file_that_is_no_model_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.onnx").write_bytes(b"nonsense")
    with pytest.raises(InternalError, match="Protobuf parsing failed"):
        await signature_of(OnnxRuntimeBackend(), source(tmp_path, ""))


@pytest.mark.parametrize("location", ["../secret.bin", "{outside}/secret.bin", "link.bin"])
async def test_weights_outside_the_model_are_not_read(tmp_path: Path, location: str) -> None:
    """H11: a graph names the file of its weights."""
    outside = tmp_path / "outside"
    outside.mkdir()
    secret = np.arange(4, dtype=np.float32).tobytes()
    for place in (outside, tmp_path / "m"):
        place.mkdir(exist_ok=True)
        (place / "secret.bin").write_bytes(secret)
    directory = tmp_path / "m" / "1"
    directory.mkdir()
    (directory / "link.bin").symlink_to(outside / "secret.bin")
    weights = TensorProto(name="b", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value=location.format(outside=outside))
    graph = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["c"])],
        "g",
        [helper.make_tensor_value_info("a", FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("c", FLOAT, ["n", 4])],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    backend = OnnxRuntimeBackend()
    with pytest.raises(CharoniaError):
        await instance_of(backend, spec(source(directory, CONFIG)))


def test_the_model_may_be_a_directory_and_must_stay_in_its_version(tmp_path: Path) -> None:
    save(tmp_path / "1" / "model.onnx" / "model.onnx")
    assert model_path(source(tmp_path, ""), "model.onnx").name == "model.onnx"
    save(tmp_path / "1" / "other.onnx")
    assert model_path(source(tmp_path, 'default_model_filename: "other.onnx"'), "model.onnx").name == "other.onnx"
    save(tmp_path / "outside.onnx")
    (tmp_path / "1" / "link.onnx").symlink_to(tmp_path / "outside.onnx")
    for escape in ("../outside.onnx", "link.onnx", str(tmp_path / "outside.onnx"), "."):
        with pytest.raises(InvalidArgument, match="is outside the version directory"):
            model_path(source(tmp_path, f'default_model_filename: "{escape}"'), "model.onnx")
    with pytest.raises(NotFound):
        model_path(source(tmp_path, 'default_model_filename: "missing.onnx"'), "model.onnx")


def option(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


async def test_session_options_come_from_parameters(tmp_path: Path) -> None:
    import onnxruntime as ort

    save(tmp_path / "1" / "model.onnx")
    text = (
        CONFIG
        + option("intra_op_thread_count", "3")
        + option("inter_op_thread_count", "2")
        + option("execution_mode", "1")
        + option("enable_mem_arena", "0")
        + option("enable_mem_pattern", "0")
        + option("memory.enable_memory_arena_shrinkage", "cpu:0")
        + option("session.set_denormal_as_zero", "1")
        + option("something_else", "x")
        + "optimization { graph { level: -1 } }"
    )
    # arena shrinkage needs the arena: keep it for the run below
    text = text.replace(option("enable_mem_arena", "0"), "")
    instance = await instance_of(OnnxRuntimeBackend(), spec(source(tmp_path, text)))
    options = instance.session.get_session_options()
    assert options.intra_op_num_threads == 3
    assert options.inter_op_num_threads == 2
    assert options.execution_mode == ort.ExecutionMode.ORT_PARALLEL
    assert not options.enable_mem_pattern
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert options.get_session_config_entry("session.set_denormal_as_zero") == "1"
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    instance.execute({"a": np.ones((1, 4), np.float32)}, ["c"])


async def test_the_servers_backend_config_is_the_default(tmp_path: Path) -> None:
    save(tmp_path / "1" / "model.onnx")
    of = source(tmp_path, CONFIG, {"intra_op_thread_count": "2", "enable_mem_arena": "false"})
    options = (await instance_of(OnnxRuntimeBackend(), spec(of))).session.get_session_options()
    assert options.intra_op_num_threads == 2
    assert not options.enable_cpu_mem_arena


@pytest.mark.parametrize(
    "text",
    [
        option("intra_op_thread_count", "many"),
        option("enable_mem_arena", "perhaps"),
        "optimization { graph { level: 7 } }",
    ],
)
async def test_an_option_with_a_bad_value_fails_the_load(tmp_path: Path, text: str) -> None:
    save(tmp_path / "1" / "model.onnx")
    with pytest.raises(InvalidArgument):
        await instance_of(OnnxRuntimeBackend(), spec(source(tmp_path, CONFIG + text)))


async def test_an_accelerator_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path / "1" / "model.onnx")
    text = 'optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }'
    with pytest.raises(Unsupported, match="'openvino'"):
        await instance_of(OnnxRuntimeBackend(), spec(source(tmp_path, CONFIG + text)))


async def test_a_provider_that_cannot_be_used_is_no_quiet_fall_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library runs on the CPU where it cannot load a provider that its build has."""
    import onnxruntime as ort

    save(tmp_path / "1" / "model.onnx")
    everything = ["OpenVINOExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: everything)
    text = 'optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }'
    with pytest.raises(InternalError, match="OpenVINOExecutionProvider"), pytest.warns(UserWarning, match="provider"):
        await instance_of(OnnxRuntimeBackend(), spec(source(tmp_path, CONFIG + text)))
    with pytest.raises(InternalError, match="CUDAExecutionProvider"), pytest.warns(UserWarning, match="provider"):
        await instance_of(OnnxRuntimeBackend(), spec(source(tmp_path, CONFIG), "GPU"))


async def test_a_gpu_instance_without_the_cuda_provider_names_the_extra(tmp_path: Path) -> None:
    import onnxruntime as ort

    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this onnxruntime has the CUDA provider")
    save(tmp_path / "1" / "model.onnx")
    with pytest.raises(Unsupported, match=r"charonia\[gpu\]"):
        await instance_of(OnnxRuntimeBackend(), spec(source(tmp_path, CONFIG), "GPU"))


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = source(tmp_path, "")
    assert BackendRegistry().of(wanted).name == "onnxruntime"
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(Unsupported, match=r"needs the onnxruntime backend.*: install charonia\[cpu\]"):
        BackendRegistry().of(wanted)
    assert not BackendRegistry().has("onnxruntime")


# -- libraries of operators (C18) --------------------------------------------------------------------------------------

LIBRARY = """
#include <stdio.h>
/* the one function that such a library must have; a status of its own, or 0 when all went well */
void *RegisterCustomOps(void *options, const void *api) {
    FILE *said = fopen("SAID", "a");
    fputs("registered", said);
    fclose(said);
    return options && api ? 0 : (void *)1;
}
"""
WITH_LIBRARY = CONFIG + 'model_operations { op_library_filename: "libmine.so" }'


def compiled(path: Path, text: str) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=text.encode(), check=True)


def allowed(directory: Path, text: str) -> ModelSource:
    """A model in a repository that is named with --allow-native-models."""
    return replace(source(directory, text), native_code=True)


@pytest.mark.parametrize("where", ["1/libmine.so", "libmine.so", "absolute"])
async def test_a_library_of_operators_is_registered(tmp_path: Path, where: str) -> None:
    save(tmp_path / "1" / "model.onnx")
    said = tmp_path / "said"
    if where == "absolute":
        path = tmp_path / "elsewhere" / "libmine.so"
        text = CONFIG + f'model_operations {{ op_library_filename: "{path}" }}'
    else:
        path, text = tmp_path / where, WITH_LIBRARY
    compiled(path, LIBRARY.replace("SAID", str(said)))
    backend = OnnxRuntimeBackend()
    assert (await signature_of(backend, allowed(tmp_path, text))).inputs == (TensorSignature("a", "FP32", (-1, 4)),)
    instance = await instance_of(backend, spec(allowed(tmp_path, text)))
    value = np.ones((1, 4), np.float32)
    np.testing.assert_array_equal(instance.execute({"a": value}, ["c"])["c"], value)
    assert said.read_text().startswith("registered")


async def test_a_library_of_operators_needs_the_leave_of_the_operator(tmp_path: Path) -> None:
    save(tmp_path / "1" / "model.onnx")
    with pytest.raises(Unsupported, match=r"brings machine code: the library of operators 'libmine\.so'"):
        await instance_of(OnnxRuntimeBackend(), spec(source(tmp_path, WITH_LIBRARY)))


async def test_a_library_that_is_none_or_not_there_fails_the_load(tmp_path: Path) -> None:
    save(tmp_path / "m" / "1" / "model.onnx")
    backend = OnnxRuntimeBackend()
    with pytest.raises(InvalidArgument, match=r"^custom operator library 'libmine.so' of model 'm' cannot be used: "):
        await instance_of(backend, spec(allowed(tmp_path / "m", WITH_LIBRARY)))
    compiled(tmp_path / "m" / "libmine.so", "int nothing;")
    with pytest.raises(InvalidArgument, match=r"cannot be used: .*RegisterCustomOps"):
        await instance_of(backend, spec(allowed(tmp_path / "m", WITH_LIBRARY)))
    compiled(tmp_path / "outside.so", "int nothing;")
    leading_out = WITH_LIBRARY.replace("libmine.so", "../outside.so")
    with pytest.raises(InvalidArgument, match="is outside the model"):
        await instance_of(backend, spec(allowed(tmp_path / "m", leading_out)))
    with pytest.raises(InvalidArgument, match="does not exist"):
        await instance_of(backend, spec(allowed(tmp_path / "m", WITH_LIBRARY.replace("libmine", "sub/libmine"))))


def counting(path: Path) -> None:
    """A graph that counts to `n` in a loop, one node after the other."""
    step = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Add", ["before", "one"], ["after"]),
        ],
        "step",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("before", TensorProto.INT64, []),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("after", TensorProto.INT64, []),
        ],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Squeeze", ["n"], ["trips"]),
            helper.make_node("Loop", ["trips", "", "zero"], ["count"], body=step),
            helper.make_node("Reshape", ["count", "shape"], ["c"]),
        ],
        "counting",
        [helper.make_tensor_value_info("n", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("c", TensorProto.INT64, [1])],
        [
            helper.make_tensor("zero", TensorProto.INT64, [], [0]),
            helper.make_tensor("one", TensorProto.INT64, [], [1]),
            helper.make_tensor("shape", TensorProto.INT64, [1], [1]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)


async def test_an_execution_that_would_not_end_can_be_interrupted(tmp_path: Path) -> None:
    counting(tmp_path / "1" / "model.onnx")
    of = source(
        tmp_path,
        'input { name: "n" data_type: TYPE_INT64 dims: 1 } output { name: "c" data_type: TYPE_INT64 dims: 1 }',
    )
    model = await OnnxRuntimeBackend().load(of)
    instance, other = await model.create_instance(spec(of)), await model.create_instance(spec(of))
    assert isinstance(instance, InterruptibleInstance)
    endless = asyncio.create_task(asyncio.to_thread(instance.execute, {"n": np.array([2**62])}, ["c"]))
    while not endless.done():  # it may not have begun when it is interrupted first
        instance.interrupt()
        assert other.execute({"n": np.array([3])}, ["c"])["c"] == [3], "another instance of the session goes on"
        await asyncio.sleep(0.001)
    with pytest.raises(Interrupted):
        await endless
    assert instance.execute({"n": np.array([5])}, ["c"])["c"] == [5], "it can be used afterwards"
