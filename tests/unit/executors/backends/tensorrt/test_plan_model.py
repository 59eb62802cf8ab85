"""The backend on plans of a fake library, over a driver library without a GPU: copies, profiles, graphs, memory."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_tensorrt
import numpy as np
import pytest
from backend_calls import instance_of, signature_of
from fake_tensorrt import FakeDriver, driver, driver_file

from charonia.backend import DeviceLost, InstanceSpec, MemoryUse, ModelSource
from charonia.errors import CharoniaError, InternalError, InvalidArgument, Unsupported
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.testing.backend_contract import CHECKS, Check, ReferenceModel
from executors.backends.tensorrt import TensorRtBackend
from executors.backends.tensorrt.plan_instance import PlanInstance
from executors.configuration.config import normalise, validate

__all__ = ["driver", "driver_file"]

ADD = fake_tensorrt.add_plan()
TWO = fake_tensorrt.add_plan(profiles=[((1, 4), (2, 4), (4, 4)), ((1, 4), (16, 4), (32, 4))])
TENSORS = """
input { name: "a" data_type: TYPE_FP32 dims: 4 } input { name: "b" data_type: TYPE_FP32 dims: 4 }
output { name: "c" data_type: TYPE_FP32 dims: 4 }
"""
GRAPHS = "optimization { cuda { graphs: true } }"


def source(directory: Path, plan: bytes, text: str = f"max_batch_size: 8 {TENSORS}", **settings: str) -> ModelSource:
    version = directory / "1"
    version.mkdir(exist_ok=True)
    (version / "model.plan").write_bytes(plan)
    config = normalise(parse(f'name: "m" platform: "tensorrt_plan" {text}'), gpus=2)
    return ModelSource("m", 1, directory, config, {key.replace("_", "-"): value for key, value in settings.items()})


def spec(of: ModelSource, device: int = 0, index: int = 0) -> InstanceSpec:
    return InstanceSpec(f"m_0_{index}", "GPU", device, of, ModelInterface.of(of.config))


async def instance(directory: Path, plan: bytes, text: str = f"max_batch_size: 8 {TENSORS}", **settings: str) -> Any:
    of = spec(source(directory, plan, text, **settings))
    return await (await TensorRtBackend().load(of.source)).create_instance(of)


def numbers(*shape: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + int(np.prod(shape)), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("more", ["", GRAPHS], ids=["plain", "graphs"])
async def test_it_keeps_the_contract(check: Check, more: str, tmp_path: Path, driver: FakeDriver) -> None:
    of = source(tmp_path, ADD, f"max_batch_size: 8 {TENSORS} {more}")
    requests = [{"a": numbers(n, 4, first=n), "b": numbers(n, 4)} for n in (2, 1, 3)]
    model = ReferenceModel(
        source=of,
        interface=ModelInterface.of(of.config),
        expected=lambda inputs: {"c": inputs["a"] + inputs["b"]},
        requests=requests,
        failing={name: np.zeros((2, 5), np.float32) for name in "ab"},
        kind="GPU",
        device_id=0,
    )
    await check(TensorRtBackend(), model)
    await driver.freed()


async def test_the_configuration_is_completed_from_the_plan(tmp_path: Path, driver: FakeDriver) -> None:
    done = await signature_of(TensorRtBackend(), source(tmp_path, ADD, ""))
    assert (done.max_batch_size, [item.name for item in done.input]) == (8, ["a", "b"])
    validate(normalise(done, gpus=2), "m", gpus=2)


class TestProfiles:
    async def test_a_context_for_each_and_the_nearest_runs(self, tmp_path: Path, driver: FakeDriver) -> None:
        text = f"max_batch_size: 32 {TENSORS} instance_group {{ name: 'm_0' kind: KIND_GPU profile: ['0', '1'] }}"
        made = await instance(tmp_path, TWO, text)
        assert [one.context.profile for one in made._contexts] == [0, 1]
        for rows, profile in ((1, 0), (3, 0), (20, 1)):
            a = numbers(rows, 4)
            assert np.array_equal(made.execute({"a": a, "b": a}, ["c"])["c"], 2 * a)
            ran = [one.profile.index for one in made._contexts if one.context.shapes["a"][0] == rows]
            assert ran == [profile]

    async def test_the_first_alone_without_names(self, tmp_path: Path, driver: FakeDriver) -> None:
        made = await instance(tmp_path, TWO, f"max_batch_size: 4 {TENSORS}")
        assert len(made._contexts) == 1
        a = numbers(5, 4)
        with pytest.raises(InvalidArgument, match="between 1 and 4 but received 5"):
            made.execute({"a": a, "b": a}, ["c"])


class TestTensors:
    @pytest.mark.parametrize("word", ["HALF", "INT8", "UINT8", "INT32", "INT64", "BOOL"])
    async def test_datatypes(self, word: str, tmp_path: Path, driver: FakeDriver) -> None:
        plan = fake_tensorrt.add_plan(dtype=word)
        done = await signature_of(TensorRtBackend(), source(tmp_path, plan, ""))
        made = await instance(
            tmp_path, plan, str(done).replace('name: "m"', "", 1).replace('platform: "tensorrt_plan"', "")
        )
        a = np.array([[0, 1, 0, 1]]).astype(fake_tensorrt._NUMPY[word])
        found = made.execute({"a": a, "b": 0 * a}, ["c"])["c"]
        assert found.dtype == a.dtype
        assert np.array_equal(found, a)

    async def test_shape_tensors_decide_the_shape(self, tmp_path: Path, driver: FakeDriver) -> None:
        done = await signature_of(TensorRtBackend(), source(tmp_path, fake_tensorrt.fill_plan(), ""))
        text = str(done).replace('name: "m"', "", 1).replace('platform: "tensorrt_plan"', "")
        made = await instance(tmp_path, fake_tensorrt.fill_plan(), text)
        for wanted in ((2, 3), (4, 6), (1, 1)):
            inputs = {"x": np.array([7], np.float32), "s": np.array(wanted)}
            found = made.execute(inputs, ["y", "twice"])
            assert np.array_equal(found["y"], np.full(wanted, 7, np.float32))
            assert found["twice"].tolist() == [2 * n for n in wanted]
        with pytest.raises(InvalidArgument, match="invalid shape values encountered for shape input 's'"):
            made.execute({"x": np.array([7], np.float32), "s": np.array([5, 1])}, ["y"])

    async def test_outputs_whose_size_is_known_at_the_end(self, tmp_path: Path, driver: FakeDriver) -> None:
        text = (
            "input { name: 'x' data_type: TYPE_FP32 dims: -1 } output { name: 'y' data_type: TYPE_FP32 dims: -1 } "
            "max_batch_size: 0 " + GRAPHS
        )
        made = await instance(tmp_path, fake_tensorrt.nonzero_plan(), text)
        for values in ([0, 1, 2], [0, 0], list(range(64)), [5]):
            x = np.array(values, np.float32)
            assert made.execute({"x": x}, ["y"])["y"].tolist() == [n for n in values if n]
        made.close()
        assert (driver.blocks, driver.objects) == (0, 0)


class TestGraphs:
    async def test_they_run_for_their_shapes_alone(self, tmp_path: Path, driver: FakeDriver) -> None:
        text = f"max_batch_size: 8 {TENSORS} dynamic_batching {{ preferred_batch_size: [2, 8] }} {GRAPHS}"
        made = await instance(tmp_path, ADD, text)
        launched = []
        for rows in (1, 2, 3, 8):
            a, before = numbers(rows, 4, first=rows), driver.launches
            assert np.array_equal(made.execute({"a": a, "b": a}, ["c"])["c"], 2 * a)
            launched.append(driver.launches - before)
        assert launched == [1, 1, 0, 1]

    async def test_a_smaller_batch_is_padded_with_zeros(self, tmp_path: Path, driver: FakeDriver) -> None:
        bound = "graph_spec { batch_size: 4 graph_lower_bound { batch_size: 2 } }"
        text = f"max_batch_size: 8 {TENSORS} optimization {{ cuda {{ graphs: true {bound} }} }}"
        made = await instance(tmp_path, ADD, text)
        full = numbers(4, 4, first=100)
        made.execute({"a": full, "b": full}, ["c"])
        a = numbers(3, 4)
        assert np.array_equal(made.execute({"a": a, "b": a}, ["c"])["c"], 2 * a)
        assert driver.launches == 2

    async def test_other_dims_are_padded_with_zeros_too(self, tmp_path: Path, driver: FakeDriver) -> None:
        plan = fake_tensorrt.add_plan((-1, -1), [((1, 1), (2, 4), (8, 8))])
        inputs = " ".join(f"input {{ key: '{name}' value {{ dim: 4 }} }}" for name in "ab")
        lower = inputs.replace("dim: 4", "dim: 1")
        spec_text = f"graph_spec {{ batch_size: 2 {inputs} graph_lower_bound {{ batch_size: 1 {lower} }} }}"
        tensors = TENSORS.replace("dims: 4", "dims: -1")
        text = f"max_batch_size: 8 {tensors} optimization {{ cuda {{ graphs: true {spec_text} }} }}"
        made = await instance(tmp_path, plan, text)
        a = numbers(1, 3, first=1)
        found = made.execute({"a": a, "b": a}, ["c"])["c"]
        assert (driver.launches, found.tolist()) == (1, [[2, 4, 6, 0]])

    async def test_a_spec_that_makes_no_sense_leaves_nothing(self, tmp_path: Path, driver: FakeDriver) -> None:
        text = f"max_batch_size: 8 {TENSORS} optimization {{ cuda {{ graphs: true graph_spec {{ batch_size: 9 }} }} }}"
        with pytest.raises(InvalidArgument, match="graph spec expects 'batch_size' to be >= 1 and <= 8"):
            await instance(tmp_path, ADD, text)
        assert (driver.blocks, driver.objects) == (0, 0)


class TestFiles:
    async def test_by_compute_capability(self, tmp_path: Path, driver: FakeDriver) -> None:
        text = f"max_batch_size: 8 {TENSORS} cc_model_filenames {{ key: '8.9' value: 'ada.plan' }}"
        of = source(tmp_path, ADD, text)
        (tmp_path / "1" / "ada.plan").write_bytes(TWO)
        backend = TensorRtBackend()
        model = await backend.load(of)
        made = await model.create_instance(spec(of, 0))
        assert len(made._engine.tensors.profiles) == 1
        with pytest.raises(InvalidArgument, match="max-batch 8 but TensorRT engine only supports max-batch 4"):
            await model.create_instance(spec(of, 1))  # the second GPU has 8.9

    async def test_one_that_is_no_plan(self, tmp_path: Path, driver: FakeDriver) -> None:
        with pytest.raises(InternalError, match=r"unable to create TensorRT engine for model 'm': .*magic tag"):
            await signature_of(TensorRtBackend(), source(tmp_path, b"\x00nothing"))

    async def test_code_in_a_plan_runs_by_the_operators_leave_only(self, tmp_path: Path, driver: FakeDriver) -> None:
        plan = json.dumps({**json.loads(ADD), "code": True}).encode()
        said = 'parameters { key: "version-compatible" value { string_value: "true" } }'
        text = f"max_batch_size: 8 {TENSORS} {said}"
        with pytest.raises(InternalError, match=r"host code is not allowed.*--allow-native-models"):
            await instance(tmp_path, plan, text)  # the model's own word is no leave
        assert await instance(tmp_path, plan, text, version_compatible="true")
        allowed = replace(source(tmp_path, plan, text), native_code=True)
        backend = TensorRtBackend()
        assert await instance_of(backend, spec(allowed))
        with pytest.raises(InternalError, match="host code is not allowed"):  # a model of another repository
            await instance_of(backend, spec(source(tmp_path, plan, text)))


class TestSettings:
    async def test_plugins_are_loaded_once(self, tmp_path: Path, driver: FakeDriver) -> None:
        for name in ("one.so", "two.so"):
            (tmp_path / name).touch()
        fake_tensorrt.IPluginRegistry.loaded.clear()
        plugins = f"{tmp_path}/one.so;{tmp_path}/two.so"
        await instance(tmp_path, ADD, plugins=plugins)
        assert ";".join(fake_tensorrt.IPluginRegistry.loaded) == plugins
        with pytest.raises(InvalidArgument, match=r"plugin library '/none\.so' could not be loaded"):
            await instance(tmp_path, ADD, plugins="/none.so")

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"execution_policy": "LATER"}, "execution-policy must be one of BLOCKING, DEVICE_BLOCKING, got 'LATER'"),
            ({"version_compatible": "perhaps"}, "version-compatible must be true or false, got 'perhaps'"),
            ({"pinned_memory_pool_byte_size": "1 GB"}, "pinned-memory-pool-byte-size must be a number of bytes"),
            ({"library": "torch"}, "library must be one of tensorrt, tensorrt_rtx, got 'torch'"),
        ],
    )
    async def test_those_that_make_no_sense(
        self, settings: dict[str, str], text: str, tmp_path: Path, driver: FakeDriver
    ) -> None:
        with pytest.raises(InvalidArgument, match=text):
            await instance(tmp_path, ADD, **settings)

    @pytest.mark.parametrize("policy", ["BLOCKING", "DEVICE_BLOCKING"])
    async def test_instances_run_at_once_under_both_policies(
        self, policy: str, tmp_path: Path, driver: FakeDriver
    ) -> None:
        of = source(tmp_path, ADD, execution_policy=policy)
        model = await TensorRtBackend().load(of)
        made = await asyncio.gather(*(model.create_instance(spec(of, index=index)) for index in range(3)))
        assert len({id(one._engine) for one in made}) == 1
        a = numbers(2, 4)

        def run(one: PlanInstance) -> list[bool]:
            """One call after the other: an instance has one thread."""
            return [np.array_equal(one.execute({"a": a, "b": a}, ["c"])["c"], 2 * a) for _ in range(5)]

        assert np.all(await asyncio.gather(*(asyncio.to_thread(run, one) for one in made)))

    async def test_the_library_for_rtx_is_found_and_can_be_chosen(
        self, tmp_path: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "tensorrt_rtx", fake_tensorrt.module("tensorrt_rtx"))
        made = await instance(tmp_path, ADD, library="tensorrt_rtx")
        assert made._trt.__name__ == "tensorrt_rtx"
        made = await instance(tmp_path, ADD)
        assert made._trt.__name__ == "tensorrt"

    @pytest.mark.parametrize(
        ("text", "error", "sentence"),
        [
            ("instance_group { kind: KIND_CPU }", InvalidArgument, "TensorRT backend supports only GPU device"),
            (
                'parameters { key: "execution_context_allocation_strategy" value { string_value: "NEVER" } }',
                InvalidArgument,
                "Supported values are 'STATIC' and 'ON_PROFILE_CHANGE'",
            ),
            (
                'parameters { key: "enable_multi_device" value { string_value: "true" } }',
                Unsupported,
                "a plan runs on one GPU",
            ),
        ],
    )
    async def test_models_that_cannot_run(
        self, text: str, error: type[CharoniaError], sentence: str, tmp_path: Path, driver: FakeDriver
    ) -> None:
        of = source(tmp_path, ADD, f"max_batch_size: 8 {TENSORS} {text}")
        kind = "CPU" if "KIND_CPU" in text else "GPU"
        with pytest.raises(error, match=sentence):
            await instance_of(TensorRtBackend(), InstanceSpec("m_0_0", kind, 0, of, ModelInterface.of(of.config)))

    async def test_the_strategy_reaches_the_library(self, tmp_path: Path, driver: FakeDriver) -> None:
        said = 'parameters { key: "execution_context_allocation_strategy" value { string_value: "ON_PROFILE_CHANGE" } }'
        made = await instance(tmp_path, ADD, f"max_batch_size: 8 {TENSORS} {said}")
        assert made._contexts[0].context.strategy.name == "ON_PROFILE_CHANGE"


class TestFailures:
    async def test_an_error_of_the_gpu_has_the_drivers_words(self, tmp_path: Path, driver: FakeDriver) -> None:
        made = await instance(tmp_path, ADD)
        a = numbers(2, 4)
        driver.fail(1)
        with pytest.raises(InternalError, match="model 'm' on GPU 0: invalid argument"):
            made.execute({"a": a, "b": a}, ["c"])
        driver.fail(0)
        assert np.array_equal(made.execute({"a": a, "b": a}, ["c"])["c"], 2 * a)

    async def test_a_gpu_that_is_lost(self, tmp_path: Path, driver: FakeDriver) -> None:
        made = await instance(tmp_path, ADD)
        a = numbers(2, 4)
        driver.fail(700)
        with pytest.raises(DeviceLost, match="model 'm' has lost GPU 0: an illegal memory access was encountered"):
            made.execute({"a": a, "b": a}, ["c"])

    async def test_no_memory_is_a_failed_load(self, tmp_path: Path, driver: FakeDriver) -> None:
        huge = fake_tensorrt.add_plan((-1, 4), [((1, 4), (4, 4), (1 << 30, 4))])
        with pytest.raises(InternalError, match="model 'm' on GPU 0: out of memory"):
            await instance(tmp_path, huge, f"max_batch_size: {1 << 30} {TENSORS}")
        assert (driver.blocks, driver.objects) == (0, 0)

    @pytest.mark.parametrize(
        "text", ["", "input_pinned_memory { enable: false } output_pinned_memory { enable: false }"]
    )
    async def test_memory_is_given_back(self, text: str, tmp_path: Path, driver: FakeDriver) -> None:
        of = source(tmp_path, TWO, f"max_batch_size: 4 {TENSORS} optimization {{ {text} cuda {{ graphs: true }} }}")
        for _ in range(3):
            model = await TensorRtBackend().load(of)
            made = await model.create_instance(spec(of))
            a = numbers(3, 4)
            assert np.array_equal(made.execute({"a": a, "b": a}, ["c"])["c"], 2 * a)
            assert driver.objects
            made.close()
            made.close()
            await model.close()
            assert (driver.blocks, driver.objects) == (0, 0)

    @pytest.mark.parametrize(("strategy", "context_bytes"), [("STATIC", 4096), ("ON_PROFILE_CHANGE", 1024)])
    async def test_memory_is_told(self, strategy: str, context_bytes: int, tmp_path: Path, driver: FakeDriver) -> None:
        said = f'parameters {{ key: "execution_context_allocation_strategy" value {{ string_value: "{strategy}" }} }}'
        plan = json.dumps({**json.loads(ADD), "weights": 10_000}).encode()
        of = source(tmp_path, plan, f"max_batch_size: 8 {TENSORS} {said}")
        model: Any = await TensorRtBackend().load(of)
        assert model.memory() == []
        made = await model.create_instance(spec(of))
        buffers = 3 * 8 * 4 * 4
        expected = [MemoryUse("GPU", 0, 10_000), MemoryUse("GPU", 0, context_bytes + buffers)]
        assert model.memory() == expected
        a = numbers(2, 4)
        made.execute({"a": a, "b": a}, ["c"])
        assert model.memory() == [*expected, MemoryUse("CPU_PINNED", 0, 2 * 4 * 4)]
        made.close()
        await model.close()

    async def test_without_pinned_memory_left_batches_are_copied_from_where_they_are(
        self, tmp_path: Path, driver: FakeDriver
    ) -> None:
        made = await instance(tmp_path, ADD, pinned_memory_pool_byte_size="100")
        pool = made._engine.library.pinned
        for rows, used in ((2, 32), (8, 0), (2, 32), (3, 48)):
            a = numbers(rows, 4, first=rows)
            assert np.array_equal(made.execute({"a": a, "b": 3 * a}, ["c"])["c"], 4 * a)
            assert pool.used_bytes == used
        made.close()
        assert (pool.used_bytes, driver.blocks) == (0, 0)


class TestWithoutAGpu:
    async def test_no_driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The module is not imported: without a driver it may end the process."""
        monkeypatch.setattr("charonia.cuda.cuda_library.LIBRARY", "libno-such-driver.so.1")
        monkeypatch.setitem(sys.modules, "tensorrt", None)
        with pytest.raises(Unsupported, match=r"runs on NVIDIA GPUs, .* has none that its driver can use \(libno-such"):
            await signature_of(TensorRtBackend(), source(tmp_path, ADD))

    async def test_no_device(self, tmp_path: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAKE_CUDA_DEVICES", "0")
        with pytest.raises(Unsupported, match=r"has none that its driver can use \(no device\)"):
            await signature_of(TensorRtBackend(), source(tmp_path, ADD))

    async def test_no_module(self, tmp_path: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("executors.backends.tensorrt.trt_library.MODULES", ("no_such_module",))
        with pytest.raises(Unsupported, match=r"install charonia\[tensorrt\], or charonia\[tensorrt-rtx\]"):
            await signature_of(TensorRtBackend(), source(tmp_path, ADD))
