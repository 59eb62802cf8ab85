"""The openvino backend on real files: ONNX, its own IR, TensorFlow Lite; parameters, batches, and served models."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expected
import inputs
import numpy as np
import onnx
import openvino
import pytest
import tflite_model
from backend_calls import instance_of, signature_of
from e2e_server import serving
from onnx import TensorProto, helper
from tritonclient import http as client

from charonia.backend import InstanceSpec, Interrupted, ModelSource, TensorSignature
from charonia.datatypes import DataType
from charonia.errors import InternalError, InvalidArgument, NotFound, Unsupported
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.testing.backend_contract import CHECKS, Check, ReferenceModel
from executors.backends.openvino import OpenVinoBackend
from executors.configuration.config import normalise

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
SIDES = (("input", "a"), ("output", "c"))
TENSORS = """
input { name: "a" data_type: TYPE_FP32 dims: 4 } input { name: "b" data_type: TYPE_FP32 dims: 4 }
output { name: "c" data_type: TYPE_FP32 dims: 4 }
"""


def add(path: Path, dims: tuple[str | int, ...] = ("n", 4), element: int = TensorProto.FLOAT) -> None:
    """A graph that adds a and b, as ONNX or, with the suffix .xml, as IR."""
    tensors = [helper.make_tensor_value_info(name, element, dims) for name in "abc"]
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["c"])], "g", tensors[:2], tensors[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path.with_suffix(".onnx"))
    if path.suffix == ".xml":
        openvino.save_model(openvino.Core().read_model(path.with_suffix(".onnx")), path, compress_to_fp16=False)
        path.with_suffix(".onnx").unlink()


def source(directory: Path, text: str = "", file: str = "model.xml", **parameters: str) -> ModelSource:
    said = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()
    )
    name = f'default_model_filename: "{file}"' if file != "model.xml" else ""
    config = normalise(parse(f'name: "m" backend: "openvino" {name} {text} {said}'))
    return ModelSource("m", 1, directory, config)


def spec(of: ModelSource, kind: str = "CPU") -> InstanceSpec:
    return InstanceSpec("m_0", kind, -1 if kind == "CPU" else 0, of, ModelInterface.of(of.config))


def sums(file: str, rows: tuple[int, ...] | None) -> Callable[[Path], ReferenceModel]:
    """The model that adds, batching where there are rows."""

    def made(directory: Path) -> ReferenceModel:
        add(directory / "1" / file, ("n", 4) if rows else (4,))
        of = source(directory, f"max_batch_size: {8 if rows else 0} {TENSORS}", file)
        numbers = itertools.count()
        shapes = [(count, 4) for count in rows] if rows else [(4,)] * 3
        requests = [
            {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + next(numbers) for name in "ab"}
            for shape in shapes
        ]
        return ReferenceModel(
            source=of,
            interface=ModelInterface.of(of.config),
            expected=lambda inputs: {"c": inputs["a"] + inputs["b"]},
            requests=requests,
            failing={name: np.zeros((2, 5) if rows else 5, np.float32) for name in "ab"},
            loads=40,
        )

    return made


def dense(directory: Path) -> ReferenceModel:
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.tflite").write_bytes(tflite_model.model_bytes())
    of = source(
        directory,
        'max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 3 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 2 }',
        "model.tflite",
    )
    numbers = np.arange(18, dtype=np.float32).reshape(6, 3)
    return ReferenceModel(
        source=of,
        interface=ModelInterface.of(of.config),
        expected=lambda inputs: {"y": tflite_model.expected(inputs["x"])},
        requests=[{"x": numbers[:2]}, {"x": numbers[2:3]}, {"x": numbers[3:]}],
        failing={"x": np.zeros((2, 5), np.float32)},
        loads=40,
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    "model",
    [sums("model.xml", (2, 1, 3)), sums("model.onnx", (2, 1, 3)), sums("model.xml", None), dense],
    ids=["ir", "onnx", "plain", "tflite"],
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_keeps_the_contract(check: Check, model: Callable[[Path], ReferenceModel], tmp_path: Path) -> None:
    await check(OpenVinoBackend(), model(tmp_path))


async def test_the_signature_has_names_types_and_dynamic_dims(tmp_path: Path) -> None:
    add(tmp_path / "1" / "model.xml", ("n", 4, "width"))
    found = await signature_of(OpenVinoBackend(), source(tmp_path))
    assert found.inputs == (TensorSignature("a", "FP32", (-1, 4, -1)), TensorSignature("b", "FP32", (-1, 4, -1)))
    assert found.outputs == (TensorSignature("c", "FP32", (-1, 4, -1)),)


@pytest.mark.parametrize("datatype", [t for t in DataType if t not in (DataType.BYTES, DataType.BOOL)])
async def test_every_type_of_numbers(tmp_path: Path, datatype: DataType) -> None:
    element = {"FP32": "FLOAT", "FP64": "DOUBLE", "FP16": "FLOAT16", "BF16": "BFLOAT16"}.get(
        datatype.value, datatype.value
    )
    add(tmp_path / "1" / "model.xml", element=TensorProto.DataType.Value(element))
    text = TENSORS.replace("TYPE_FP32", datatype.config_name)
    instance = await instance_of(OpenVinoBackend(), spec(source(tmp_path, f"max_batch_size: 8 {text}")))
    a = np.array([[1, 2, 3, 4], [5, 6, 7, 8]]).astype(datatype.numpy)
    result = instance.execute({"a": a, "b": a}, ["c"])["c"]
    assert result.dtype == datatype.numpy
    assert np.array_equal(result, a + a)


async def test_a_batch_dimension_of_one_is_made_to_vary(tmp_path: Path) -> None:
    add(tmp_path / "1" / "model.xml", (1, 4))
    text = f"max_batch_size: 8 {TENSORS}"
    instance = await instance_of(OpenVinoBackend(), spec(source(tmp_path, text)))
    three = np.ones((3, 4), np.float32)
    assert instance.execute({"a": three, "b": three}, ["c"])["c"].shape == (3, 4)
    with pytest.raises(InvalidArgument, match="model 'm'"):  # it stays 1, and does not fit
        await instance_of(OpenVinoBackend(), spec(source(tmp_path, text, SKIP_OV_DYNAMIC_BATCHSIZE="YES")))


async def test_batches_are_padded_to_the_largest(tmp_path: Path) -> None:
    add(tmp_path / "1" / "model.xml")
    instance = await instance_of(
        OpenVinoBackend(), spec(source(tmp_path, f"max_batch_size: 8 {TENSORS}", ENABLE_BATCH_PADDING="YES"))
    )
    three = np.arange(12, dtype=np.float32).reshape(3, 4)
    result = instance.execute({"a": three, "b": three}, ["c"])["c"]
    assert np.array_equal(result, 2 * three)
    assert list(instance._request.get_tensor("a").shape) == [8, 4]


async def test_layers_are_reshaped_to_the_configuration(tmp_path: Path) -> None:
    add(tmp_path / "1" / "model.xml", ("n", "width"))
    of = source(tmp_path, f"max_batch_size: 8 {TENSORS}", RESHAPE_IO_LAYERS="YES")
    found = await signature_of(OpenVinoBackend(), of)
    assert [tensor.dims for tensor in (*found.inputs, *found.outputs)] == [(-1, 4)] * 3


async def test_parameters_reach_the_library(tmp_path: Path) -> None:
    add(tmp_path / "1" / "model.xml")
    of = source(
        tmp_path, f"max_batch_size: 8 {TENSORS}", NUM_STREAMS="2", INFERENCE_NUM_THREADS="2", PERFORMANCE_HINT="LATENCY"
    )
    model = await OpenVinoBackend().load(of)
    await model.create_instance(spec(of))
    (compiled,) = model._compiled.values()
    assert compiled.model.get_property("INFERENCE_NUM_THREADS") == 2
    assert int(compiled.model.get_property("NUM_STREAMS")) == 2
    assert str(compiled.model.get_property("PERFORMANCE_HINT")).endswith("LATENCY")


async def test_a_stream_for_each_instance_and_one_model_for_all(tmp_path: Path) -> None:
    add(tmp_path / "1" / "model.xml")
    of = source(tmp_path, f"max_batch_size: 8 {TENSORS} instance_group {{ count: 2 kind: KIND_CPU }}")
    model = await OpenVinoBackend().load(of)
    one, other = await asyncio.gather(*(model.create_instance(spec(of)) for _ in range(2)))
    assert one._request is not other._request
    (compiled,) = model._compiled.values()
    assert int(compiled.model.get_property("NUM_STREAMS")) == min(2, len(os.sched_getaffinity(0)))


async def test_streams_are_the_hints_and_devices_may_choose(tmp_path: Path) -> None:
    """Without streams of its own a hint chooses them; a virtual device hands the CPU's properties on."""
    add(tmp_path / "1" / "model.xml")
    one = np.full((1, 4), 1.001, np.float32)  # not exact in BF16
    for parameters, streams in (
        ({"PERFORMANCE_HINT": "latency"}, 1),
        ({"NUM_STREAMS": "numa"}, 1),
        ({"TARGET_DEVICE": "auto"}, None),
        ({"TARGET_DEVICE": "HETERO:CPU", "NUM_STREAMS": "2"}, None),
    ):
        of = source(tmp_path, f"max_batch_size: 8 {TENSORS} instance_group {{ count: 2 kind: KIND_CPU }}", **parameters)
        model = await OpenVinoBackend().load(of)
        instance = await model.create_instance(spec(of))
        assert instance.execute({"a": one, "b": one}, ["c"])["c"][0, 0] == np.float32(2.002)
        (compiled,) = model._compiled.values()
        if streams is not None:
            assert int(compiled.model.get_property("NUM_STREAMS")) == streams


async def test_the_configuration_may_name_other_types(tmp_path: Path) -> None:
    """As in Triton: tensors are converted on their way in and out."""
    add(tmp_path / "1" / "model.xml", element=TensorProto.FLOAT16)
    of = source(tmp_path, f"max_batch_size: 8 {TENSORS.replace('TYPE_FP32', 'TYPE_INT32', 1)}")
    found = await signature_of(OpenVinoBackend(), of)
    assert [tensor.datatype for tensor in (*found.inputs, *found.outputs)] == ["INT32", "FP32", "FP32"]
    instance = await instance_of(OpenVinoBackend(), spec(of))
    given = {"a": np.array([[1, 2, 3, 4]], np.int32), "b": np.array([[0.5, 0.5, 0.5, 0.5]], np.float32)}
    result = instance.execute(given, ["c"])["c"]
    assert result.dtype == np.float32
    assert result.tolist() == [[1.5, 2.5, 3.5, 4.5]]


async def test_an_input_that_is_left_out_is_not_that_of_the_batch_before(tmp_path: Path) -> None:
    add(tmp_path / "1" / "model.xml")
    instance = await instance_of(OpenVinoBackend(), spec(source(tmp_path, f"max_batch_size: 8 {TENSORS}")))
    one = np.ones((1, 4), np.float32)
    instance.execute({"a": one, "b": one}, ["c"])
    with pytest.raises(InvalidArgument, match="model 'm' needs the input 'b' in every request"):
        instance.execute({"a": one}, ["c"])


async def test_ragged_requests_are_one_flat_batch(tmp_path: Path) -> None:
    """The graph gets all elements of a batch, and where each request ends."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("n",)) for name in ("a", "lengths", "c")]
    graph = helper.make_graph([helper.make_node("ReduceSum", ["a"], ["t"], keepdims=1),
                               helper.make_node("Add", ["lengths", "t"], ["c"])], "g", ends[:2], ends[2:])  # fmt: skip
    (tmp_path / "1").mkdir()
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10),
        tmp_path / "1" / "model.onnx",
    )
    text = """
    max_batch_size: 8 input { name: "a" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
    batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "lengths" data_type: TYPE_FP32 source_input: "a" }
    output { name: "c" data_type: TYPE_FP32 dims: 1 reshape { } }
    """
    instance = await instance_of(OpenVinoBackend(), spec(source(tmp_path, text, "model.onnx")))
    for lengths in ((2, 5), (1, 2, 9)):
        flat = np.ones(lengths[-1], np.float32)
        result = instance.execute({"a": flat, "lengths": np.array(lengths, np.float32)}, ["c"])["c"]
        assert result.tolist() == [length + lengths[-1] for length in lengths]
    with pytest.raises(InvalidArgument, match="does not go with ragged inputs"):
        await instance_of(OpenVinoBackend(), spec(source(tmp_path, text, "model.onnx", ENABLE_BATCH_PADDING="YES")))


@pytest.mark.parametrize(
    ("parameters", "error", "text"),
    [
        ({"PERFORMANCE_HINT": "FAST"}, InvalidArgument, "must be one of LATENCY, THROUGHPUT"),
        (
            {"NUM_STREAMS": "-1"},
            InvalidArgument,
            "'NUM_STREAMS' of 'm' must be AUTO, NUMA or an integer of at least 0, ",
        ),
        ({"ENABLE_BATCH_PADDING": "perhaps"}, InvalidArgument, "must be 0 or 1, got 'perhaps'"),
        ({"TARGET_DEVICE": "GPU"}, Unsupported, "asks for the device 'GPU', OpenVINO has CPU"),
        (
            {"CPU_EXTENSION_PATH": "/tmp/x.so"},
            Unsupported,
            "machine code: 'CPU_EXTENSION_PATH' /tmp/x.so. .*--allow-native-",
        ),
    ],
)
async def test_parameters_that_make_no_sense(
    parameters: dict[str, str], error: type[Exception], text: str, tmp_path: Path
) -> None:
    add(tmp_path / "1" / "model.xml")
    with pytest.raises(error, match=text):
        await instance_of(OpenVinoBackend(), spec(source(tmp_path, f"max_batch_size: 8 {TENSORS}", **parameters)))


async def test_an_extension_is_loaded_where_the_operator_allows_it(tmp_path: Path) -> None:
    """This one is none: it says that it was loaded, and has nothing that OpenVINO looks for."""
    add(tmp_path / "1" / "model.xml")
    library, said = tmp_path / "libmine.so", tmp_path / "said"
    code = f'''#include <stdio.h>
__attribute__((constructor)) void loaded(void) {{ FILE *said = fopen("{said}", "w"); fclose(said); }}'''
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    await asyncio.to_thread(subprocess.run, command, input=code.encode(), check=True)
    of = source(tmp_path, f"max_batch_size: 8 {TENSORS}", CPU_EXTENSION_PATH=str(library))
    with pytest.raises(Unsupported, match="machine code"):
        await signature_of(OpenVinoBackend(), of)
    assert not said.exists()
    with pytest.raises(InternalError, match=r"^openvino error: .*libmine\.so"):
        await signature_of(OpenVinoBackend(), dataclasses.replace(of, native_code=True))
    assert said.exists()


async def test_files_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    with pytest.raises(NotFound, match="unable to find"):
        await signature_of(OpenVinoBackend(), source(tmp_path))
    for name, content in (("model.xml", b"<net"), ("model.onnx", b"none"), ("model.tflite", b"TFL3" * 9)):
        (tmp_path / "1" / name).write_bytes(content)
        with pytest.raises(InternalError, match=r"^openvino error: (?!Exception from src)"):
            await signature_of(OpenVinoBackend(), source(tmp_path, file=name))
    (tmp_path / "1" / "model.bin").write_bytes(b"")
    with pytest.raises(
        Unsupported,
        match=r"reads .xml, .onnx, .tflite, .pdmodel, .graphdef, .pb and folders with saved_model.pb, not 'model.bin'",
    ):
        await signature_of(OpenVinoBackend(), source(tmp_path, file="model.bin"))


async def test_weights_outside_the_model_are_not_read(tmp_path: Path) -> None:
    add(tmp_path / "1" / "model.xml")
    (tmp_path / "1" / "model.bin").rename(tmp_path / "outside.bin")
    (tmp_path / "1" / "model.pdmodel").write_bytes(b"graph")
    for weights in ("model.bin", "model.pdiparams"):
        (tmp_path / "1" / weights).symlink_to(tmp_path / "outside.bin")
    for file in ("model.xml", "model.pdmodel"):
        with pytest.raises(InvalidArgument, match="weights of 'm' are outside the version directory"):
            await signature_of(OpenVinoBackend(), source(tmp_path, file=file))


@pytest.mark.parametrize("place", ["../outside.bin", "linked.bin", "absolute"])
async def test_weights_of_onnx_files_outside_the_model_are_not_read(tmp_path: Path, place: str) -> None:
    outside = tmp_path / "outside.bin"
    outside.write_bytes(np.ones(4, np.float32).tobytes())
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "linked.bin").symlink_to(outside)
    weights = TensorProto(name="b", dims=(4,), data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value=str(outside) if place == "absolute" else place)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("n", 4)) for name in "ac"]
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["c"])], "g", ends[:1], ends[1:], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (tmp_path / "1" / "model.onnx").write_bytes(model.SerializeToString())
    of = source(tmp_path, file="model.onnx")
    with pytest.raises(InternalError, match=r"^openvino error: "):
        await signature_of(OpenVinoBackend(), of)
    if place == "linked.bin":  # a file in its place is read
        (tmp_path / "1" / place).unlink()
        outside.rename(tmp_path / "1" / place)
        assert [tensor.name for tensor in (await signature_of(OpenVinoBackend(), of)).inputs] == ["a"]


async def test_an_instance_that_was_interrupted_can_be_used(tmp_path: Path) -> None:
    add(tmp_path / "1" / "model.xml")
    instance = await instance_of(OpenVinoBackend(), spec(source(tmp_path, f"max_batch_size: 8 {TENSORS}")))
    one = np.ones((1, 4), np.float32)
    for _ in range(3):
        instance.interrupt()  # nothing runs
        assert instance.execute({"a": one, "b": one}, ["c"])["c"][0, 0] == 2


async def test_an_inference_that_is_interrupted_for_the_one_before_it_runs_again(tmp_path: Path) -> None:
    """The interruption came late, after the next one had begun."""
    size = 512
    weights = helper.make_tensor(
        "w", TensorProto.FLOAT, (size, size), np.ones((size, size), np.float32).tobytes(), True
    )
    names = ["a", *(f"t{number}" for number in range(59)), "c"]
    nodes = [helper.make_node("MatMul", [before, "w"], [after]) for before, after in itertools.pairwise(names)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("n", size)) for name in "ac"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [weights])
    (tmp_path / "1").mkdir()
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), tmp_path / "1" / "model.onnx")
    tensors = " ".join(f'{side} {{ name: "{name}" data_type: TYPE_FP32 dims: 512 }}' for side, name in SIDES)
    of = source(tmp_path, f"max_batch_size: 8 {tensors}", "model.onnx")
    instance = await instance_of(OpenVinoBackend(), spec(of))
    rows = np.ones((4096, size), np.float32)
    running = asyncio.ensure_future(asyncio.to_thread(instance.execute, {"a": rows}, ["c"]))
    while not running.done():
        instance._request.cancel()
        await asyncio.sleep(0)
    with pytest.raises(Interrupted):
        await running
    assert instance.execute({"a": rows[:1] * 0}, ["c"])["c"][0, 0] == 0


async def test_what_a_closed_instance_is_told_and_an_output_that_there_is_not(tmp_path: Path) -> None:
    add(tmp_path / "1" / "model.xml")
    instance = await instance_of(OpenVinoBackend(), spec(source(tmp_path, f"max_batch_size: 8 {TENSORS}")))
    one = np.ones((1, 4), np.float32)
    with pytest.raises(InvalidArgument, match="model 'm' has no output 'd'"):
        instance.execute({"a": one, "b": one}, ["d"])
    instance.close()
    instance.interrupt()


def infer(server: Any, model: str, name: str, array: np.ndarray, output: str) -> np.ndarray:
    with client.InferenceServerClient(server.http, network_timeout=120) as asked:
        tensor = client.InferInput(name, list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        found = asked.infer(model, [tensor]).as_numpy(output)
        assert found is not None
        return found


def test_a_real_model_answers_as_with_onnxruntime(tmp_path: Path) -> None:
    """The recognition model of the OCR example, under both backends, in one server."""
    for name, backend in (("with_onnxruntime", "onnxruntime"), ("with_openvino", "openvino")):
        version = tmp_path / "models" / name / "1"
        version.mkdir(parents=True)
        (version / "model.onnx").write_bytes((EXAMPLES / "ocr_rec" / "1" / "model.onnx").read_bytes())
        text = f'backend: "{backend}" default_model_filename: "model.onnx" max_batch_size: 8'
        (tmp_path / "models" / name / "config.pbtxt").write_text(text)
    lines = np.random.default_rng(1).random((3, 3, 48, 320), np.float32)
    with serving(tmp_path / "models", tmp_path / "state") as server:
        one, other = (infer(server, name, "x", lines, "fetch_name_0") for name in ("with_onnxruntime", "with_openvino"))
    assert one.shape == other.shape
    np.testing.assert_allclose(one, other, atol=1e-4)


def test_the_ocr_example_reads_the_same_text(tmp_path: Path) -> None:
    """Its two models of ONNX are served as `docs/howto/openvino.md` says, the others stay as they are."""
    models = tmp_path / "models"
    for name in ("ocr", "ocr_page", "ocr_det", "ocr_lines", "ocr_rec", "ocr_text"):
        shutil.copytree(EXAMPLES / name, models / name)
    command = re.search(
        r"^sed .*(?:\n .*)*", (EXAMPLES.parents[1] / "docs/howto/openvino.md").read_text(), re.MULTILINE
    )
    assert command is not None
    subprocess.run(["sh", "-euc", command[0].replace("my-models", str(models))], check=True)
    with (
        serving(models, tmp_path / "state") as server,
        client.InferenceServerClient(server.http, network_timeout=120) as asked,
    ):
        for name in ("ocr_det", "ocr_rec"):
            assert asked.get_model_config(name)["backend"] == "openvino"
        (name, page), *_ = inputs.REQUESTS["ocr"]().items()
        tensor = client.InferInput(name, list(page.shape), "BYTES")
        tensor.set_data_from_numpy(page)
        found = asked.infer("ocr", [tensor])
        expected.check("ocr", {name: found.as_numpy(name) for name in expected.OUTPUTS["ocr"]}, EXAMPLES)
