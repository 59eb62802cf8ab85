"""The pytorch backend on real files: TorchScript, exported programs, AOTInductor packages, classes with weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from backend_calls import instance_of, signature_of
from torch_models import (
    CODE,
    DENSE,
    STRUCTURE,
    Made,
    Writes,
    as_class,
    as_package,
    as_program,
    as_script,
    dense,
    eager,
    exported,
    nested,
    nested_inputs,
    nested_program,
    nested_tensors,
    package,
    scripted,
    source,
    spec,
)

from charonia.backend import ModelSource, TensorSignature
from charonia.datatypes import DataType
from charonia.errors import InternalError, InvalidArgument, NotFound, Unsupported
from charonia.models.interface import ModelInterface
from charonia.testing.backend_contract import CHECKS, Check, Inputs, ReferenceModel
from executors.backends.pytorch import PyTorchBackend
from executors.backends.pytorch.model_archives import Form
from executors.backends.pytorch.torch_instance import TorchInstance
from executors.backends.pytorch.torch_settings import TorchSettings
from executors.backends.registry import BackendRegistry
from executors.batches.answers import OutputPart
from executors.configuration.autofill import from_graph
from executors.configuration.config import normalise

__all__ = ["package"]

FORMS = [as_script, as_program, as_class]


def reference_of(made: Made, directory: Path) -> ReferenceModel:
    of = made(directory)
    numbers = np.random.default_rng(1).standard_normal((6, 4), np.float32)

    def expected(inputs: Inputs) -> dict[str, np.ndarray]:
        return {"OUTPUT__0": eager(dense(), inputs["x"])}

    return ReferenceModel(
        source=of,
        interface=ModelInterface.of(of.config),
        expected=expected,
        requests=[{"x": numbers[:2]}, {"x": numbers[2:3]}, {"x": numbers[3:]}],
        failing={"x": np.zeros((2, 5), np.float32)},
        strict=True,
        loads=3 if made is as_program else 40,
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("made", FORMS, ids=lambda made: made.__name__[3:])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_keeps_the_contract(check: Check, made: Made, tmp_path: Path) -> None:
    await check(PyTorchBackend(), reference_of(made, tmp_path))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_packages_keep_the_contract(check: Check, tmp_path: Path, package: bytes) -> None:
    of = source(as_package(tmp_path, package), f"max_batch_size: 8 {nested_tensors()}", leave=True)

    def expected(inputs: Inputs) -> dict[str, np.ndarray]:
        return dict(zip(STRUCTURE[4:], nested(*(inputs[name] for name in STRUCTURE[:4])), strict=True))

    requests = [dict(zip(STRUCTURE, nested_inputs(rows), strict=False)) for rows in (2, 1, 3)]
    failing = {**requests[0], "ARGS[0]": np.zeros((2, 5), np.float32)}
    interface = ModelInterface.of(of.config)
    await check(
        PyTorchBackend(),
        ReferenceModel(of, interface, expected, requests, failing, strict=True, loads=3, rtol=1e-5, atol=1e-6),
    )


@pytest.mark.parametrize("made", [as_script, as_program, as_class], ids=lambda made: made.__name__[3:])
async def test_answers_equal_eager_torch_to_the_bit(made: Made, tmp_path: Path) -> None:
    instance = await instance_of(PyTorchBackend(), spec(made(tmp_path)))
    for rows in (1, 2, 8):
        given = np.random.default_rng(rows).standard_normal((rows, 4), np.float32)
        assert np.array_equal(instance.execute({"x": given}, ["OUTPUT__0"])["OUTPUT__0"], eager(dense(), given))


# -- names and signatures ---------------------------------------------------------------------------------------------


async def test_an_exported_program_completes_the_configuration(tmp_path: Path) -> None:
    exported(dense(), tmp_path / "1" / "model.pt2")
    of = source(tmp_path, "")
    found = await signature_of(PyTorchBackend(), of)
    assert found.inputs == (TensorSignature("INPUT__0", "FP32", (-1, 4)),)
    assert found.outputs == (TensorSignature("OUTPUT__0", "FP32", (-1, 3)),)
    completed = from_graph(of.config, found)
    assert completed.max_batch_size == 4
    assert list(completed.input[0].dims) == [4]


FORWARD = ("x", "ARGS[1][k]", "ARGS[1][w]", "scale", "y", "RESULT[z][0]", "RESULT[z][1]")
POSITION = ("in__0", "in__1", "in__2", "in__3", "out__0", "out__1", "out__2")
ORDER = ("first", "second", "third", "fourth", "one", "two", "three")
NAMES = [("program", names) for names in (FORWARD, STRUCTURE, POSITION, ORDER)]
NAMES += [("package", names) for names in (STRUCTURE, POSITION, ORDER)]
"""A package does not say what the arguments of `forward` were called."""


@pytest.mark.parametrize(("form", "names"), NAMES, ids=lambda value: value if isinstance(value, str) else value[0])
async def test_names_by_structure_position_and_order(
    form: str, names: tuple[str, ...], tmp_path: Path, package: bytes
) -> None:
    if form == "package":
        as_package(tmp_path, package)
    else:
        (tmp_path / "1").mkdir()
        torch.export.save(nested_program(), tmp_path / "1" / "model.pt2")
    of = source(tmp_path, f"max_batch_size: 8 {nested_tensors(names)}", leave=True)
    instance = await instance_of(PyTorchBackend(), spec(of))
    given = nested_inputs(3)
    found = instance.execute(dict(zip(names, given, strict=False)), names[4:])
    for name, wanted in zip(names[4:], nested(*given), strict=True):
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("made", [as_script, as_program], ids=lambda made: made.__name__[3:])
async def test_names_that_fit_nothing(made: Made, tmp_path: Path) -> None:
    made(tmp_path)
    text = DENSE + ' input { name: "more" data_type: TYPE_FP32 dims: 4 }'
    with pytest.raises(InvalidArgument, match=r"has the inputs x, more; the file has 1: INPUT__0/"):
        await instance_of(PyTorchBackend(), spec(source(tmp_path, f"max_batch_size: 8 {text}")))


class Halves(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
        return (x + y) * scale


HALVES = (
    "import torch\n\nclass Halves(torch.nn.Module):\n    def forward(self, x, y, scale=0.5):\n"
    "        return (x + y) * scale\n"
)


def halves(form: Form, directory: Path, inputs: str) -> ModelSource:
    """`Halves` in a form, with these inputs in its configuration."""
    (directory / "1").mkdir()
    if form is Form.SCRIPT:
        scripted(Halves(), directory / "1" / "model.pt")
    else:
        (directory / "1" / "model.py").write_text(HALVES)
    tensors = "".join(f'input {{ name: "{name}" data_type: TYPE_FP32 dims: 4 }} ' for name in inputs.split())
    runtime = 'runtime: "model.py" ' if form is Form.CODE else ""
    return source(directory, f'{runtime}{tensors}output {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: 4 }}')


@pytest.mark.parametrize("form", [Form.SCRIPT, Form.CODE], ids=lambda form: form.name)
async def test_each_argument_without_a_default_is_an_input(form: Form, tmp_path: Path) -> None:
    of = halves(form, tmp_path, "INPUT__0")
    with pytest.raises(InvalidArgument, match="configuration has no input for INPUT__1/y, which forward needs"):
        await instance_of(PyTorchBackend(), spec(of))


@pytest.mark.parametrize("form", [Form.SCRIPT, Form.CODE], ids=lambda form: form.name)
async def test_an_argument_with_a_default_may_be_left_out(form: Form, tmp_path: Path) -> None:
    instance = await instance_of(PyTorchBackend(), spec(halves(form, tmp_path, "y x")))
    given = {"x": np.ones(4, np.float32), "y": np.full(4, 3, np.float32)}
    assert np.array_equal(instance.execute(given, ["OUTPUT__0"])["OUTPUT__0"], np.full(4, 2))


@pytest.mark.parametrize(("text", "side"), [("output", "input"), ("input", "output")])
async def test_a_form_that_does_not_say_its_tensors_needs_them_written(text: str, side: str, tmp_path: Path) -> None:
    as_script(tmp_path)
    of = source(tmp_path, f'{text} {{ name: "{text.upper()}__0" data_type: TYPE_FP32 dims: [-1, 4] }}')
    with pytest.raises(InvalidArgument, match=f"must contain at least one {side}, none were specified"):
        await instance_of(PyTorchBackend(), spec(of))


async def test_an_argument_that_was_constant_when_it_was_exported_is_no_input(tmp_path: Path) -> None:
    class Powers(torch.nn.Module):
        def forward(self, x: torch.Tensor, power: int, y: torch.Tensor) -> torch.Tensor:
            return x**power + y

    (tmp_path / "1").mkdir()
    program = torch.export.export(Powers(), (torch.ones(4), 3, torch.ones(4)))
    torch.export.save(program, tmp_path / "1" / "model.pt2")
    of = source(tmp_path, "")
    found = await signature_of(PyTorchBackend(), of)
    assert [tensor.name for tensor in found.inputs] == ["INPUT__0", "INPUT__1"]
    of = ModelSource("m", 1, tmp_path, normalise(from_graph(of.config, found)))
    instance = await instance_of(PyTorchBackend(), spec(of))
    x = np.arange(4, dtype=np.float32)
    result = instance.execute({"INPUT__0": x, "INPUT__1": x}, ["OUTPUT__0"])["OUTPUT__0"]
    assert np.array_equal(result, x**3 + x)


# -- datatypes --------------------------------------------------------------------------------------------------------


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], -1)


@pytest.mark.parametrize("datatype", [one for one in DataType if one is not DataType.BYTES])
async def test_every_type_of_numbers(tmp_path: Path, datatype: DataType) -> None:
    scripted(Twice(), tmp_path / "1" / "model.pt")
    text = f'input {{ name: "x" data_type: {datatype.config_name} dims: 2 }} '
    text += f'output {{ name: "y" data_type: {datatype.config_name} dims: 4 }}'
    instance = await instance_of(PyTorchBackend(), spec(source(tmp_path, f"max_batch_size: 8 {text}")))
    given = np.array([[0, 1], [1, 0]]).astype(datatype.numpy)
    result = instance.execute({"x": given}, ["y"])["y"]
    assert result.dtype == datatype.numpy
    assert np.array_equal(result, np.concatenate([given, given], -1))


class Words(torch.nn.Module):
    def forward(self, words: list[str], count: int) -> tuple[list[str], torch.Tensor]:
        found: list[str] = []
        for word in words:
            found.append(word.upper())
        return found, torch.tensor([len(word) * count for word in words])


async def test_text_and_numbers_as_arguments(tmp_path: Path) -> None:
    scripted(Words(), tmp_path / "1" / "model.pt")
    text = (
        'input { name: "words" data_type: TYPE_STRING dims: -1 } input { name: "count" data_type: TYPE_INT64 dims: 1 } '
        'output { name: "OUTPUT__0" data_type: TYPE_STRING dims: -1 } '
        'output { name: "OUTPUT__1" data_type: TYPE_INT64 dims: -1 }'
    )
    instance = await instance_of(PyTorchBackend(), spec(source(tmp_path, text)))
    words = np.array([b"ab", b"c"], np.object_)
    found = instance.execute({"words": words, "count": np.array([2])}, ["OUTPUT__0", "OUTPUT__1"])
    assert found["OUTPUT__0"].tolist() == [b"AB", b"C"]
    assert found["OUTPUT__1"].tolist() == [4, 2]
    with pytest.raises(InvalidArgument, match="argument 'count' of forward is one number, got a tensor of 2"):
        instance.execute({"words": words, "count": np.array([2, 3])}, ["OUTPUT__0"])
    with pytest.raises(InvalidArgument, match="must be UTF-8"):
        instance.execute({"words": np.array([b"\xff"], np.object_), "count": np.array([2])}, ["OUTPUT__0"])
    with pytest.raises(InvalidArgument, match="must have 1 dimension"):
        instance.execute({"words": words.reshape(1, 2), "count": np.array([2])}, ["OUTPUT__0"])


async def test_another_type_than_configured_is_an_error(tmp_path: Path) -> None:
    scripted(Twice(), tmp_path / "1" / "model.pt")
    text = 'input { name: "x" data_type: TYPE_INT32 dims: 2 } output { name: "y" data_type: TYPE_FP32 dims: 4 }'
    of = source(tmp_path, text)
    found = (await instance_of(PyTorchBackend(), spec(of))).execute({"x": np.zeros(2, np.int32)}, ["y"])
    with pytest.raises(InternalError, match=r"unexpected datatype TYPE_INT32 for inference output 'y' .* TYPE_FP32"):
        OutputPart.of(ModelInterface.of(of.config), "y", found, 1)


class Dictionary(torch.nn.Module):
    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": inputs["a"] + inputs["b"], "difference": inputs["a"] - inputs["b"]}


async def test_dicts_of_torchscript(tmp_path: Path) -> None:
    scripted(Dictionary(), tmp_path / "1" / "model.pt")
    text = " ".join(f'input {{ name: "{name}" data_type: TYPE_FP32 dims: 2 }}' for name in "ab")
    text += " ".join(f' output {{ name: "{name}" data_type: TYPE_FP32 dims: 2 }}' for name in ("difference", "sum"))
    instance = await instance_of(PyTorchBackend(), spec(source(tmp_path, text)))
    a, b = np.array([3, 4], np.float32), np.array([1, 1], np.float32)
    found = instance.execute({"a": a, "b": b}, ["sum", "difference"])
    assert found["sum"].tolist() == [4, 5]
    assert found["difference"].tolist() == [2, 3]


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.sum()
        x.zero_()
        return self.total


async def test_state_is_an_instances_own_and_results_stay_as_they_were(tmp_path: Path) -> None:
    scripted(Counter(), tmp_path / "1" / "model.pt")
    text = 'input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    of = source(tmp_path, text)
    model = await PyTorchBackend().load(of)
    one, other = await asyncio.gather(*(model.create_instance(spec(of)) for _ in range(2)))
    given = np.ones(1, np.float32)
    first, second = one.execute({"x": given}, ["y"])["y"], one.execute({"x": given}, ["y"])["y"]
    assert (first.item(), second.item(), other.execute({"x": given}, ["y"])["y"].item()) == (1, 2, 1)
    assert given.item() == 1
    assert not one.stateless
    of = source(tmp_path, text, ENABLE_WEIGHT_SHARING="true")
    model = await PyTorchBackend().load(of)
    one, other = await asyncio.gather(*(model.create_instance(spec(of)) for _ in range(2)))
    assert one.execute({"x": given}, ["y"])["y"].item() == 1
    assert other.execute({"x": given}, ["y"])["y"].item() == 2
    assert one.stateless


# -- compiled packages ------------------------------------------------------------------------------------------------


async def test_machine_code_needs_leave(tmp_path: Path, package: bytes) -> None:
    of = source(as_package(tmp_path, package), f"max_batch_size: 8 {nested_tensors()}")
    with pytest.raises(Unsupported, match=r"brings machine code: 'model.pt2' is an AOTInductor package"):
        await instance_of(PyTorchBackend(), spec(of))


async def test_a_package_checks_what_it_is_given(
    tmp_path: Path, package: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check, which an operator may have turned off, float64 was read as float32 and answered."""
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "0")
    of = source(as_package(tmp_path, package), f"max_batch_size: 8 {nested_tensors()}", leave=True)
    instance = await instance_of(PyTorchBackend(), spec(of))
    given = dict(zip(STRUCTURE, nested_inputs(2), strict=False))
    with pytest.raises(InternalError, match="unmatched dtype"):
        instance.execute({**given, "ARGS[0]": np.zeros((2, 4), np.float64)}, STRUCTURE[4:])
    with pytest.raises(InternalError, match="unmatched dim value"):
        instance.execute({**given, "ARGS[0]": np.zeros((2, 5), np.float32)}, STRUCTURE[4:])


async def test_a_package_that_takes_two_rows_or_more_gets_them(tmp_path: Path, package: bytes) -> None:
    of = source(as_package(tmp_path, package), f"max_batch_size: 8 {nested_tensors()}", leave=True)
    instance = await instance_of(PyTorchBackend(), spec(of))
    x, k, w, scale = map(torch.tensor, nested_inputs(1))
    with pytest.raises(RuntimeError, match="expected it to be >= 2, but got: 1"):
        torch._inductor.aoti_load_package(str(tmp_path / "1" / "model.pt2"))(x, {"k": k, "w": w}, scale=scale)
    for rows in (1, 2, 8):
        given = nested_inputs(rows)
        found = instance.execute(dict(zip(STRUCTURE, given, strict=False)), STRUCTURE[4:])
        for name, wanted in zip(STRUCTURE[4:], nested(*given), strict=True):
            assert found[name].shape == wanted.shape
            np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["program", "package"])
async def test_a_batch_larger_than_it_was_made_for_fails_the_load(form: str, tmp_path: Path, package: bytes) -> None:
    if form == "program":
        as_program(tmp_path)
    else:
        as_package(tmp_path, package)
    of = source(tmp_path, f"max_batch_size: 65 {DENSE if form == 'program' else nested_tensors()}", leave=True)
    with pytest.raises(InvalidArgument, match=r"does not take a batch of max_batch_size, 65 rows: .*64"):
        await instance_of(PyTorchBackend(), spec(of))


# -- parameters -------------------------------------------------------------------------------------------------------


def first(instance: Any, given: dict[str, np.ndarray]) -> int:
    """What an instance answers first, in a thread of its own."""
    instance.started()
    return int(instance.execute(given, ["y"])["y"].item())


async def test_threads_are_set_in_the_thread_that_executes(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.py").write_text(
        "import torch\n\nclass Threads(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x + torch.get_num_threads()\n"
    )
    text = 'runtime: "model.py" input { name: "x" data_type: TYPE_INT64 dims: 1 } '
    text += 'output { name: "y" data_type: TYPE_INT64 dims: 1 }'
    given = {"x": np.zeros(1, np.int64)}
    for key, threads in (("NUM_THREADS", 3), ("INTRA_OP_THREAD_COUNT", 1)):
        instance = await instance_of(PyTorchBackend(), spec(source(tmp_path, text, **{key: str(threads)})))
        assert await asyncio.to_thread(first, instance, given) == threads
    instance = await instance_of(PyTorchBackend(), spec(source(tmp_path, text), cores=frozenset({0})))
    assert await asyncio.to_thread(first, instance, given) == 1


async def test_autocast_computes_in_less_precision_and_answers_as_configured(tmp_path: Path) -> None:
    of = as_class(tmp_path)
    given = np.random.default_rng(1).standard_normal((4, 4), np.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = dense()(torch.tensor(given)).float().detach().numpy()
    text = 'max_batch_size: 8 runtime: "model.py" ' + DENSE
    instance = await instance_of(PyTorchBackend(), spec(source(tmp_path, text, charonia__autocast="bf16")))
    found = instance.execute({"x": given}, ["OUTPUT__0"])["OUTPUT__0"]
    assert np.array_equal(found, wanted)
    exact = await instance_of(PyTorchBackend(), spec(of))
    assert not np.array_equal(found, exact.execute({"x": given}, ["OUTPUT__0"])["OUTPUT__0"])


class Strides(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), torch.tensor([[x.stride(1), self.layer.weight.stride(1)]])


async def test_channels_last_reaches_inputs_and_weights(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Strides().eval()
    scripted(model, tmp_path / "1" / "model.pt")
    text = (
        'max_batch_size: 1 input { name: "x" data_type: TYPE_FP32 dims: [ 3, 9, 9 ] } '
        'output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 8, 7, 7 ] } '
        'output { name: "OUTPUT__1" data_type: TYPE_INT64 dims: 2 }'
    )
    given = np.random.default_rng(1).random((1, 3, 9, 9), np.float32)
    for said, strides in (({}, [81, 9]), ({"charonia__channels_last": "true"}, [1, 1])):
        instance = await instance_of(PyTorchBackend(), spec(source(tmp_path, text, **said)))
        found = instance.execute({"x": given}, ["OUTPUT__0", "OUTPUT__1"])
        assert found["OUTPUT__1"].tolist() == [strides]
        with torch.inference_mode():
            np.testing.assert_allclose(found["OUTPUT__0"], model(torch.tensor(given))[0].numpy(), rtol=1e-4, atol=1e-6)


WARMED = (
    'model_warmup { name: "w" batch_size: 2 '
    'inputs { key: "x" value { data_type: TYPE_FP32 dims: 4 zero_data: true } } }'
)


async def test_a_class_is_compiled_when_it_says_so(tmp_path: Path) -> None:
    of = as_class(tmp_path)
    text = f'max_batch_size: 8 runtime: "model.py" {DENSE} {WARMED}'
    options = json.dumps({"backend": "eager", "dynamic": True})
    of_compiled = spec(source(tmp_path, text, TORCH_COMPILE_OPTIONAL_PARAMETERS=options))
    compiled = await (await PyTorchBackend().load(of_compiled.source)).create_instance(of_compiled)
    assert isinstance(compiled._program.module, torch._dynamo.eval_frame.OptimizedModule)
    given = {"x": np.random.default_rng(1).standard_normal((4, 4), np.float32)}
    plain = await (await PyTorchBackend().load(of)).create_instance(spec(of))
    assert not isinstance(plain._program.module, torch._dynamo.eval_frame.OptimizedModule)
    one, other = (instance.execute(given, ["OUTPUT__0"])["OUTPUT__0"] for instance in (compiled, plain))
    assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("parameters", "error", "text"),
    [
        ({"NUM_THREADS": "many"}, InvalidArgument, "'NUM_THREADS' of 'm' must be an integer of at least 0, got 'many'"),
        ({"INFERENCE_MODE": "perhaps"}, InvalidArgument, "must be 0 or 1, got 'perhaps'"),
        ({"charonia__autocast": "fp8"}, InvalidArgument, "'charonia.autocast' of 'm' must be bf16 or fp16, got 'fp8'"),
        ({"TORCH_COMPILE_OPTIONAL_PARAMETERS": "{"}, InvalidArgument, "must be JSON"),
        ({"TORCH_COMPILE_OPTIONAL_PARAMETERS": "[]"}, InvalidArgument, "must be a JSON object"),
        ({"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"model": 1}'}, InvalidArgument, "'model': 1 is none of fullgraph"),
        ({"TORCH_COMPILE_OPTIONAL_PARAMETERS": "{}"}, InvalidArgument, "add model_warmup"),
    ],
)
async def test_parameters_that_make_no_sense(
    parameters: dict[str, str], error: type[Exception], text: str, tmp_path: Path
) -> None:
    as_class(tmp_path)
    of = source(tmp_path, f'max_batch_size: 8 runtime: "model.py" {DENSE}', **parameters)
    with pytest.raises(error, match=text):
        await instance_of(PyTorchBackend(), spec(of))


async def test_parameters_that_a_form_does_not_have(tmp_path: Path, package: bytes) -> None:
    as_script(tmp_path / "script")
    of = source(tmp_path / "script", TORCH_COMPILE_OPTIONAL_PARAMETERS="{}")
    with pytest.raises(Unsupported, match="compiles a class, and the model is TorchScript"):
        await instance_of(PyTorchBackend(), spec(of))
    as_package(tmp_path / "package", package)
    of = source(tmp_path / "package", f"max_batch_size: 8 {nested_tensors()}", leave=True, charonia__autocast="bf16")
    with pytest.raises(Unsupported, match="has no effect on an AOTInductor package"):
        await instance_of(PyTorchBackend(), spec(of))


async def test_gpus_that_there_are_not(tmp_path: Path) -> None:
    assert not torch.cuda.is_available()
    with pytest.raises(Unsupported, match="the installed torch sees no CUDA device"):
        await instance_of(PyTorchBackend(), spec(as_script(tmp_path), "GPU"))


# -- files ------------------------------------------------------------------------------------------------------------


async def test_files_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    with pytest.raises(NotFound, match=r"unable to find '.*/1/model.pt'"):
        await signature_of(PyTorchBackend(), source(tmp_path))
    (tmp_path / "1" / "model.pt").write_bytes(b"none")
    with pytest.raises(InternalError, match=r"'model.pt' is no archive"):
        await signature_of(PyTorchBackend(), source(tmp_path))
    torch.save(dense().state_dict(), tmp_path / "1" / "model.pt")
    with pytest.raises(Unsupported, match=r"holds weights and no model; write the class of the model into model.py"):
        await signature_of(PyTorchBackend(), source(tmp_path))
    (tmp_path / "1" / "model.py").write_text(CODE)
    with pytest.raises(InvalidArgument, match=r'is code, which runs only with runtime: "model.py"'):
        await signature_of(PyTorchBackend(), source(tmp_path, f'default_model_filename: "model.py" {DENSE}'))


async def test_weights_that_are_a_program_are_not_unpickled(tmp_path: Path) -> None:
    as_class(tmp_path)
    (tmp_path / "1" / "model.safetensors").unlink()
    (tmp_path / "1" / "model.pt").write_bytes(b"")
    torch.save(Writes(tmp_path / "written"), tmp_path / "1" / "model.pt")
    with pytest.raises(InternalError, match="Weights only load failed"):
        await instance_of(PyTorchBackend(), spec(source(tmp_path, f'max_batch_size: 8 runtime: "model.py" {DENSE}')))
    assert not (tmp_path / "written").exists()


async def test_a_class_that_does_not_fit(tmp_path: Path) -> None:
    of = as_class(tmp_path)
    (tmp_path / "1" / "model.py").write_text("import torch")
    with pytest.raises(InvalidArgument, match=r"must define one subclass of torch.nn.Module .*, found none"):
        await instance_of(PyTorchBackend(), spec(of))
    (tmp_path / "1" / "model.py").write_text(CODE.replace("self.block", "self.other"))
    with pytest.raises(InternalError, match=r"(?s)Missing key.*other.layer.weight.*Unexpected key.*block.layer.weight"):
        await instance_of(PyTorchBackend(), spec(of))


def test_who_runs_a_class(tmp_path: Path) -> None:
    """`runtime: "model.py"` is a python-based backend's word, too: where there is one, it is that."""
    of = as_class(tmp_path / "m")
    assert BackendRegistry().of(of).name == "pytorch"
    (tmp_path / "backends" / "pytorch").mkdir(parents=True)
    (tmp_path / "backends" / "pytorch" / "model.py").write_text("")
    with_backend = ModelSource("m", 1, of.directory, of.config, {"backend-directory": str(tmp_path / "backends")})
    assert BackendRegistry().of(with_backend).name == "python"


class FakeStreams:
    """`torch.cuda` as far as an instance uses it: notes what is asked of it."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def set_device(self, device: Any) -> None:
        self.events.append(f"use {device}")

    def synchronize(self, device: Any) -> None:
        self.events.append(f"wait for {device}")

    def Stream(self, device: Any) -> FakeStreams:
        self.events.append(f"stream on {device}")
        self.of_stream = FakeStreams()
        self.of_stream.synchronize = lambda: self.events.append("wait for the stream")  # type: ignore[method-assign,misc,assignment]
        return self.of_stream

    @contextlib.contextmanager
    def stream(self, stream: FakeStreams) -> Iterator[None]:
        assert stream is self.of_stream
        self.events.append("enter")
        yield
        self.events.append("leave")


@pytest.mark.parametrize("own", [True, False])
async def test_an_instance_uses_its_gpu_and_may_have_a_stream_of_its_own(own: bool, tmp_path: Path) -> None:
    """The weights are there before it, its work is between entering and leaving, and outputs leave when it is done."""
    on_cpu = await instance_of(PyTorchBackend(), spec(as_script(tmp_path)))
    of = source(tmp_path, f"max_batch_size: 8 {DENSE}", charonia__own_stream=str(own).lower())
    on_gpu = spec(of, "GPU")
    cuda = FakeStreams()
    names = ("from_numpy", "inference_mode", "no_grad", "set_num_threads", "Tensor", "bfloat16")
    fake = SimpleNamespace(cuda=cuda, **{name: getattr(torch, name) for name in names})
    settings = TorchSettings.of(on_gpu, Form.SCRIPT)
    assert settings.own_stream is own
    assert not TorchSettings.of(spec(of), Form.SCRIPT).own_stream, "a CPU has none"
    program = on_cpu._instance._program
    instance = TorchInstance(fake, on_gpu, program, settings, torch.device("cuda", 1), 0, stateless=True)
    run = program.module
    program.module = lambda x: (cuda.events.append("run"), run(x))[1]
    instance.started()
    given = np.ones((2, 4), np.float32)
    for _ in range(2):
        answer = instance.execute({"x": given}, ["OUTPUT__0"])["OUTPUT__0"]
        assert np.array_equal(answer, eager(dense(), given))
    each = ["enter", "run", "wait for the stream", "leave"] if own else ["run"]
    assert cuda.events == ["use cuda:1"] + own * ["wait for cuda:1", "stream on cuda:1"] + each + each
