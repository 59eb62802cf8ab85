"""The exchange of arrays over a driver library without a GPU: copies are late, so what is read too early is wrong."""

from __future__ import annotations

import gc
import logging
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import device_models
import ml_dtypes
import numpy as np
import pytest
from device_models import TENSORS, Given, OnDevice, numbers
from fake_tensorrt import FakeDriver, driver, driver_file

from charonia.backend import Backend, DeviceLost, InstanceSpec, ModelSource, Outcome, Timings
from charonia.cuda.cuda_stream import CudaDevice, CudaDevices
from charonia.cuda.dlpack_capsules import head_of
from charonia.cuda.pinned_memory import PinnedPool, shared_pool
from charonia.errors import InternalError, InvalidArgument, Unsupported
from charonia.exchange.exchanging_instance import ExchangingInstance, with_wanted_memory
from charonia.models.interface import ModelInterface
from charonia.testing.backend_contract import CHECKS, Check, ReferenceModel

__all__ = ["driver", "driver_file"]


async def exchanging(model: Any, of: InstanceSpec) -> ExchangingInstance:
    made = await with_wanted_memory(model, model, of)
    assert isinstance(made, ExchangingInstance)
    return made


def arrays_of(found: Mapping[str, Any] | Outcome) -> Mapping[str, Any]:
    return found.arrays if isinstance(found, Outcome) else found


def pool() -> PinnedPool:
    return shared_pool(CudaDevices.shared(), 0)


class Doubling(Backend):
    """The model of `OnDevice`, which refuses more than 4 columns."""

    name = "doubling"
    api = (1, 0)

    async def load(self, source: ModelSource) -> Any:
        return DoublingModel()


class DoublingModel:
    wants = "device"

    async def signature(self) -> None: ...

    async def create_instance(self, spec: InstanceSpec) -> OnDevice:
        return Checked()

    async def close(self) -> None: ...


class Checked(OnDevice):
    def execute(self, inputs: Mapping[str, Any], outputs: Any) -> Mapping[str, Any]:
        if inputs["x"].shape[1] > 4:
            raise InvalidArgument("too many columns")
        found = super().execute(inputs, outputs)
        return {name: found[name] for name in outputs}


class TestOnAGpu:
    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_the_contract(self, check: Check, tmp_path: Path, driver: FakeDriver) -> None:
        of = device_models.spec(tmp_path).source
        model = ReferenceModel(
            source=of,
            interface=ModelInterface.of(of.config),
            expected=lambda inputs: {"y": 2 * inputs["x"]},
            requests=[{"x": numbers(n, 4, first=n)} for n in (2, 1, 3)],
            failing={"x": np.zeros((2, 5), np.float32)},
            kind="GPU",
            device_id=0,
        )
        await check(Doubling(), model)
        await driver.freed()

    async def test_batch_after_batch(self, tmp_path: Path, driver: FakeDriver) -> None:
        made = await exchanging(OnDevice(), device_models.spec(tmp_path))
        kept = []
        for rows in (2, 5, 1, 2, 64, 3):
            x = numbers(rows, 7, first=rows)
            found = made.execute({"x": x}, ["y"])
            assert isinstance(found, Outcome)
            assert found.timings is not None
            assert min(found.timings.input_ns, found.timings.infer_ns, found.timings.output_ns) > 0
            kept.append((2 * x, found.arrays["y"]))
        assert all(np.array_equal(*pair) for pair in kept)  # no output lies where a later one was put
        made.close()
        made.close()
        del kept, found
        gc.collect()
        assert (driver.blocks, driver.objects, pool().used_bytes) == (0, 0, 0)

    async def test_the_models_stream_waits_for_the_copies(self, tmp_path: Path, driver: FakeDriver) -> None:
        made = await exchanging(OnDevice(waits=True), device_models.spec(tmp_path))
        for first in range(3):
            x = numbers(2, 3, first=first)
            assert np.array_equal(arrays_of(made.execute({"x": x}, ["y"]))["y"], 2 * x)
        made.close()

    async def test_memory_is_used_again(self, tmp_path: Path, driver: FakeDriver) -> None:
        made = await exchanging(OnDevice(), device_models.spec(tmp_path))
        seen = []
        for _ in range(20):
            made.execute({"x": numbers(3, 4)}, ["y"])
            seen.append(driver.blocks)
        assert len(set(seen[1:])) == 1  # the first input is still used when the second comes
        made.close()

    @pytest.mark.parametrize("kind", ["int8", "uint16", "int64", "float16", "float64", "bool", "bfloat16"])
    async def test_datatypes(self, kind: str, tmp_path: Path, driver: FakeDriver) -> None:
        made = await exchanging(OnDevice(), device_models.spec(tmp_path))
        dtype = np.dtype(getattr(ml_dtypes, kind) if kind == "bfloat16" else kind)
        x = np.array([[0, 1], [1, 0]]).astype(dtype)
        found = arrays_of(made.execute({"x": x}, ["y"]))["y"]
        assert found.dtype == dtype
        assert np.array_equal(found.astype(int), (2 * x).astype(dtype).astype(int))
        made.close()

    async def test_text_and_empty_arrays(self, tmp_path: Path, driver: FakeDriver) -> None:
        words = np.array([b"a", b"b"], np.object_)
        model = Given("device", lambda inputs: {"w": inputs["w"], "e": inputs["e"]})
        made = await exchanging(model, device_models.spec(tmp_path))
        found = arrays_of(made.execute({"w": words, "e": np.empty((0, 3), np.float32)}, ["w", "e"]))
        assert found["w"] is words
        assert found["e"].shape == (0, 3)
        assert model.seen[0]["e"].__dlpack_device__() == (2, 0)

    async def test_an_input_may_be_the_output_and_may_be_kept(self, tmp_path: Path, driver: FakeDriver) -> None:
        model = Given("device", lambda inputs: {"y": inputs["x"]})
        made = await exchanging(model, device_models.spec(tmp_path))
        for first in range(3):  # `seen` keeps all inputs
            x = numbers(2, 3, first=first)
            assert np.array_equal(arrays_of(made.execute({"x": x}, ["y"]))["y"], x)
        again = [arrays_of(made._outcome({"y": one["x"]}, ["y"], 0, 0))["y"] for one in model.seen]
        assert [one[0, 0] for one in again] == [0, 1, 2]
        made.close()
        assert driver.blocks == 3 + 3  # three inputs, and the outputs that `again` views
        model.seen.clear()
        del again
        gc.collect()
        assert driver.blocks == 0

    async def test_an_input_that_is_not_read_is_copied_before_its_memory_is_used_again(
        self, tmp_path: Path, driver: FakeDriver
    ) -> None:
        model = Given("device", lambda inputs: {"y": np.zeros(1)})
        made = await exchanging(model, device_models.spec(tmp_path, pinned_memory_pool_byte_size="0"))
        x = numbers(2, 3)
        made.execute({"x": x}, ["y"])
        x[:] = -1
        (seen,) = model.seen
        assert np.array_equal(arrays_of(made._outcome({"y": seen["x"]}, ["y"], 0, 0))["y"], numbers(2, 3))

    async def test_outputs_with_gaps_or_transposed(self, tmp_path: Path, driver: FakeDriver) -> None:
        class Turned:
            def __init__(self, array: Any) -> None:
                self.array = array

            def __dlpack_device__(self) -> Any:
                return self.array.__dlpack_device__()

            def __dlpack__(self, *, stream: int) -> Any:
                capsule = self.array.__dlpack__(stream=stream)
                head = head_of(capsule)
                head.shape[0], head.shape[1] = 3, 2
                head.strides[0], head.strides[1] = 1, 4
                return capsule

        made = await exchanging(
            Given("device", lambda inputs: {"y": Turned(inputs["x"])}), device_models.spec(tmp_path)
        )
        x = numbers(2, 4)
        assert np.array_equal(arrays_of(made.execute({"x": x}, ["y"]))["y"], x[:, :3].T)

    async def test_an_output_may_lie_on_another_gpu(self, tmp_path: Path, driver: FakeDriver) -> None:
        other = OnDevice(1)
        model = Given("pinned", lambda inputs: other.execute({"x": there(inputs["x"])}, ["y"]))

        def there(x: Any) -> Any:
            link = made._link_to(1)
            with link.device.current():
                return link.send({"x": link.staged(x)})["x"]

        made = await exchanging(model, device_models.spec(tmp_path))
        assert np.array_equal(arrays_of(made.execute({"x": numbers(2, 3)}, ["y"]))["y"], 2 * numbers(2, 3))

    async def test_after_a_failure_the_gpu_is_waited_for(self, tmp_path: Path, driver: FakeDriver) -> None:
        def fail(_inputs: Any) -> Any:
            raise InvalidArgument("no")

        made = await exchanging(Given("device", fail), device_models.spec(tmp_path))
        with pytest.raises(InvalidArgument, match="no"):
            made.execute({"x": numbers(2, 3)}, ["y"])
        assert driver.drains == 1

    async def test_a_gpu_that_is_lost(self, tmp_path: Path, driver: FakeDriver) -> None:
        made = await exchanging(OnDevice(), device_models.spec(tmp_path))
        driver.fail(700)
        with pytest.raises(DeviceLost, match="model 'm' has lost GPU 0: an illegal memory access") as lost:
            made.execute({"x": numbers(2, 3)}, ["y"])
        assert (lost.value.shared, lost.value.blameless) == (True, False)

    async def test_an_error_that_passes(self, tmp_path: Path, driver: FakeDriver) -> None:
        made = await exchanging(OnDevice(), device_models.spec(tmp_path))
        driver.fail(1)
        with pytest.raises(InternalError, match="model 'm' on GPU 0: invalid argument"):
            made.execute({"x": numbers(2, 3)}, ["y"])
        driver.fail(0)
        assert np.array_equal(arrays_of(made.execute({"x": numbers(2, 3)}, ["y"]))["y"], 2 * numbers(2, 3))

    async def test_the_models_library_says_that_the_gpu_is_lost(self, tmp_path: Path, driver: FakeDriver) -> None:
        said: list[Exception] = [
            InternalError("PyTorch execute failure: CUDA error: device-side assert triggered"),
            InvalidArgument("no such word: CUDA error: device-side assert triggered"),
            InternalError("CUDA error: out of memory"),
        ]

        def fail(_inputs: Any) -> Any:
            raise said[0]

        made = await exchanging(Given("device", fail), device_models.spec(tmp_path))
        for expected in (DeviceLost, InvalidArgument, InternalError):
            with pytest.raises(expected, match="CUDA error"):
                made.execute({"x": numbers(2, 3)}, ["y"])
            said.pop(0)

    async def test_on_a_cpu_no_gpu_is_lost(self, tmp_path: Path) -> None:
        def fail(_inputs: Any) -> Any:
            raise InternalError("CUDA error: device-side assert triggered")

        made = await exchanging(Given("device", fail), device_models.spec(tmp_path, kind="CPU"))
        with pytest.raises(InternalError):
            made.execute({"x": numbers(2, 3)}, ["y"])

    async def test_there_has_to_be_a_driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("charonia.cuda.cuda_library.LIBRARY", "libno-such-driver.so.1")
        model = Given("device", dict)
        with pytest.raises(Unsupported, match="model 'm' wants its tensors on GPU 0, which NVIDIA's driver cannot use"):
            await exchanging(model, device_models.spec(tmp_path))
        assert model.closed == 1

    async def test_another_word(self, tmp_path: Path) -> None:
        wrong: Any = "gpu"
        with pytest.raises(InternalError, match="it has to be one of host, pinned, device"):
            await exchanging(Given(wrong, dict), device_models.spec(tmp_path))


class TestPinned:
    async def test_batches_are_joined_there_or_copied_there(self, tmp_path: Path, driver: FakeDriver) -> None:
        model = Given("pinned", lambda inputs: {"y": inputs["x"]})
        made = await exchanging(model, device_models.spec(tmp_path))
        joined = made.allocate(64)
        assert joined is not None
        assert pool().covers(joined)
        x = joined.view(np.float32).reshape(2, 8)
        x[:] = 3
        assert arrays_of(made.execute({"x": x}, ["y"]))["y"] is x
        elsewhere = numbers(2, 8)
        found = arrays_of(made.execute({"x": elsewhere}, ["y"]))["y"]
        assert found is not elsewhere
        assert pool().covers(found)
        assert np.array_equal(found, elsewhere)
        turned = arrays_of(made.execute({"x": x.T}, ["y"]))["y"]
        assert turned.flags.c_contiguous

    async def test_the_pool_has_a_size(
        self, tmp_path: Path, driver: FakeDriver, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = Given("pinned", lambda inputs: {"y": inputs["x"]})
        made = await exchanging(model, device_models.spec(tmp_path, pinned_memory_pool_byte_size="8192"))
        with caplog.at_level(logging.WARNING):
            kept = [arrays_of(made.execute({"x": numbers(1024, first=n)}, ["y"]))["y"] for n in range(4)]
        model.seen.clear()
        assert [pool().covers(one) for one in kept] == [True, True, False, False]
        assert [one[0] for one in kept] == [0, 1, 2, 3]
        assert made.allocate(1) is None
        assert (pool().used_bytes, len(caplog.records)) == (8192, 1)
        assert pool().refused >= 2
        assert "no pinned memory for 4096 bytes, 8192 of 8192 are used" in caplog.text
        del kept
        assert made.allocate(6000) is not None  # memory of other sizes makes place
        made.close()
        assert pool().used_bytes == 0

    async def test_it_is_left_out_where_the_configuration_says_so(self, tmp_path: Path, driver: FakeDriver) -> None:
        text = f"max_batch_size: 8 {TENSORS} optimization {{ input_pinned_memory {{ enable: false }} }}"
        model = Given("pinned", lambda inputs: {"y": inputs["x"]})
        made = await exchanging(model, device_models.spec(tmp_path, text))
        x = numbers(2, 3)
        assert arrays_of(made.execute({"x": x}, ["y"]))["y"] is x
        assert (made.allocate(10), made.pins) == (None, False)

    async def test_without_a_driver_memory_is_ordinary(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("charonia.cuda.cuda_library.LIBRARY", "libno-such-driver.so.1")
        made = await exchanging(Given("pinned", lambda inputs: {"y": inputs["x"]}), device_models.spec(tmp_path))
        x = numbers(2, 3)
        assert arrays_of(made.execute({"x": x}, ["y"]))["y"] is x
        assert made.allocate(10) is None

    async def test_memory_that_is_there_is_pinned(self, tmp_path: Path, driver: FakeDriver) -> None:
        model = Given("pinned", lambda inputs: {"y": inputs["x"]})
        made = await exchanging(model, device_models.spec(tmp_path))
        memory = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
        made.pin(memory.ctypes.data, 4096)
        made.pin(memory.ctypes.data, 4096)
        x = memory[64:128].view(np.float32)
        assert arrays_of(made.execute({"x": x}, ["y"]))["y"] is x
        made.pin(memory.ctypes.data, 65536)
        assert (driver.registered, pool().used_bytes) == (1, 65536)
        made.pin(memory.ctypes.data, 1 << 40)  # more than the pool has
        assert (driver.registered, pool().used_bytes) == (0, 0)
        made.pin(memory.ctypes.data, 4096)
        made.close()
        assert driver.registered == 0


class TestOnTheHost:
    """On a CPU inputs are as they were; outputs of any library are taken."""

    async def test_inputs_stay_and_numpy_passes(self, tmp_path: Path) -> None:
        made = await exchanging(
            Given("device", lambda inputs: {"y": inputs["x"]}), device_models.spec(tmp_path, kind="CPU")
        )
        x = numbers(2, 3)
        found = made.execute({"x": x}, ["y"])
        assert isinstance(found, dict)
        assert found["y"] is x

    async def test_arrays_of_others_are_views(self, tmp_path: Path) -> None:
        class Foreign:
            def __init__(self, array: Any) -> None:
                self.array = array

            def __dlpack_device__(self) -> Any:
                return self.array.__dlpack_device__()

            def __dlpack__(self) -> Any:
                return self.array.__dlpack__()

        memory = numbers(4, 3)
        made = await exchanging(
            Given("device", lambda inputs: {"y": Foreign(memory[::2].T)}), device_models.spec(tmp_path, kind="CPU")
        )
        found = arrays_of(made.execute({"x": memory}, ["y"]))["y"]
        assert np.shares_memory(found, memory)
        assert np.array_equal(found, memory[::2].T)
        memory[0, 0] = 100
        assert found[0, 0] == 100

    async def test_timings_and_failures_of_the_instance_stay(self, tmp_path: Path) -> None:
        said = Outcome({"y": numbers(2)}, Timings(1, 2, 3), {1: InvalidArgument("no")})
        made = await exchanging(Given("device", lambda inputs: said), device_models.spec(tmp_path, kind="CPU"))
        found = made.execute({"x": numbers(2)}, ["y"])
        assert isinstance(found, Outcome)
        assert (found.timings, found.failures) == (said.timings, said.failures)

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ([1.0], "output 'y' of model 'm' is a list: neither a NumPy array nor one with __dlpack__"),
            ("device 7", "lies on a device that is none of NVIDIA's: DLPack's kind 7"),
            ("raises", "output 'y' of model 'm' cannot be taken through DLPack: not now"),
        ],
    )
    async def test_what_is_no_array(self, value: Any, text: str, tmp_path: Path) -> None:
        class Odd:
            def __dlpack_device__(self) -> tuple[int, int]:
                return (7 if value == "device 7" else 1), 0

            def __dlpack__(self) -> Any:
                raise BufferError("not now")

        returned = value if isinstance(value, list) else Odd()
        made = await exchanging(Given("device", lambda _: {"y": returned}), device_models.spec(tmp_path, kind="CPU"))
        with pytest.raises(InternalError) as raised:
            made.execute({"x": numbers(2)}, ["y"])
        assert text in str(raised.value)


async def test_those_that_want_the_host_stay_as_they_are(tmp_path: Path) -> None:
    model = Given("host", dict)
    assert await with_wanted_memory(model, model, device_models.spec(tmp_path)) is model
    bare = object()
    assert await with_wanted_memory(object(), bare, device_models.spec(tmp_path)) is bare


async def test_gpus_of_a_process_are_shared(driver: FakeDriver) -> None:
    assert CudaDevices.shared() is CudaDevices.shared()
    assert CudaDevice(CudaDevices.shared(), 1).capability() == "8.9"
