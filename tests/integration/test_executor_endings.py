"""An executor that drains, and instances of its models that die."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executor_bench import ME, WEIGHTS, Follower, linear, running, x
from memory_log.log import MemoryLog

from charonia import keys
from charonia.errors import CharoniaError, LogUnavailable
from charonia.eventlog.payloads import PayloadDirectory
from charonia.eventlog.port import Fields
from charonia.facts.events import BatchDied, BatchFinished, BatchReturned, ExecutorDraining, VersionLoaded
from charonia.tensors import Tensor
from charonia.wire import BLOB, BatchHeader, Reference, ResponseRecord, request_meta, slot_place, unpack_wave, wave_head

# -- draining ----------------------------------------------------------------------------------------------------------


async def test_draining_finishes_what_runs_and_gives_back_the_rest(tmp_path: Path) -> None:
    linear(tmp_path / "m" / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        batches = []
        for i in range(50):
            _, record = await bench.accept("m", [Tensor.of("x", x(1, i))])
            batches.append(await bench.dispatch("m", [record]))
        assert await bench.service.drain(10)
        facts = Follower(bench.log, keys.facts("m"))
        ends = await facts.until(
            lambda: (
                len(found := [f for f in facts.facts() if isinstance(f, (BatchFinished, BatchReturned))]) == 50
                and found
            )
        )
        assert sorted(fact.batch_id for fact in ends) == sorted(batches)
        returned = sum(isinstance(fact, BatchReturned) for fact in ends)
        assert (await bench.log.pending("m"))[0] == returned
        assert await bench.log.range(keys.batches(ME)) == []
        await bench.control.fact(ExecutorDraining)


async def test_what_comes_during_a_drain_goes_back_although_the_log_was_away_for_a_moment(tmp_path: Path) -> None:
    class Hiccup(MemoryLog):
        away = False

        async def append(self, stream: bytes, fields: Fields) -> bytes:
            if self.away and stream == keys.CONTROL:
                self.away = False
                raise LogUnavailable("a moment")
            return await super().append(stream, fields)

    python_model(tmp_path / "py", HELD)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    log = Hiccup()
    async with running(tmp_path, log=log) as bench:
        request_id, record = await bench.accept("py", [Tensor.of("x", np.array([[1, 2]], np.float32))])
        batch_id = await bench.dispatch("py", [record])
        opened = await asyncio.to_thread(gate.open, "wb")  # it runs now
        log.away = True
        draining = asyncio.ensure_future(bench.service.drain(30))
        await bench.control.fact(ExecutorDraining)
        _, record = await bench.accept("py", [Tensor.of("x", np.array([[1, 2]], np.float32))])
        returned = await bench.finished("py", await bench.dispatch("py", [record]), BatchReturned)
        assert returned.reason == "executor drains"
        opened.close()
        await bench.finished("py", batch_id)
        assert await draining
        assert (await bench.replies("gw", 1))[request_id].error is None


@pytest.mark.parametrize("in_column", [True, False])
async def test_a_wave_that_goes_back_holds_no_memory_of_its_sender(tmp_path: Path, in_column: bool) -> None:
    """A batcher of the executor's process keeps the wave that it dispatched, to dispatch it again."""
    python_model(tmp_path / "models" / "py", HELD)
    gate = tmp_path / "models" / "gate"
    os.mkfifo(gate)
    sender = PayloadDirectory(str(tmp_path / "shm"), "gw")
    sender.open()
    tensor = Tensor.of("x", np.array([[1, 2]], np.float32))
    async with running(tmp_path / "models", hosts_batcher=True, shm_dir=str(tmp_path / "shm")) as bench:
        assert bench.link is not None
        _, record = await bench.accept("py", [tensor])
        running_id = await bench.dispatch("py", [record])
        opened = await asyncio.to_thread(gate.open, "wb")  # it runs now
        lent = sender.lend([tensor.data])
        assert lent is not None
        meta = request_meta(1, "", [tensor], (), {})
        about: dict[str, Any] = {"column_at": lent} if in_column else {"references": [lent]}
        wave = unpack_wave(
            wave_head(*(bytes(15), 1, b"gw", meta), rows=1, signature=7, level=0, accepted_ns=0, **about)
        )
        entries = ((keys.queue("py", 0, 0), b"1-0"),)
        header = BatchHeader("b-w", "py", 1, "", 1, (1,), keys.facts("py"), False, None, entries)
        bench.link.batches.hand(header, [wave])
        assert bytes(*(wave.columns if in_column else wave.payloads)) == bytes(tensor.data)
        draining = asyncio.ensure_future(bench.service.drain(30))
        await bench.finished("py", "b-w", BatchReturned)
        assert (wave.columns, wave.payloads) == ((), ())
        sender.remove(lent)
        again = sender.lend([tensor.data])
        assert again is not None
        assert slot_place(again.name)[0] == slot_place(lent.name)[0], "the slot is free for another payload"
        opened.close()
        await bench.finished("py", running_id)
        assert await draining
    sender.close()


async def test_what_is_fetched_while_its_model_is_loaded_anew_is_given_back(tmp_path: Path) -> None:
    class Slow(MemoryLog):
        def __init__(self) -> None:
            super().__init__()
            self.asked, self.answer = asyncio.Event(), asyncio.Event()

        async def blob(self, blob_id: str) -> bytes | None:
            self.asked.set()
            await self.answer.wait()
            return await super().blob(blob_id)

    model = tmp_path / "m" / "1" / "model.onnx"
    linear(model)
    log = Slow()
    async with running(tmp_path, log=log, model_control_mode="explicit", load_model=("m",)) as bench:
        data = x(1).tobytes()
        await log.put_blob("far", data, 60)
        tensors = [Tensor.of("x", x(1))]
        _, record = await bench.accept("m", tensors, reference=Reference(BLOB, "far", len(data)))
        batch_id = await bench.dispatch("m", [record])
        await log.asked.wait()
        linear(model, WEIGHTS * 2)
        assert (await bench.request("load", "m")).error == ""
        await bench.service._deployment._retirement.idle()
        log.answer.set()
        assert "reloaded" in (await bench.finished("m", batch_id, BatchReturned)).reason
        again = await bench.dispatch("m", [record])
        await bench.finished("m", again)


async def test_who_waits_for_settlements_waits_for_all_of_them(tmp_path: Path) -> None:
    class Late(MemoryLog):
        """Settles at once and says so when it is asked to."""

        def __init__(self) -> None:
            super().__init__()
            self.answers: list[Callable[[], None]] = []
            self.settled = asyncio.Event()

        def settle_now(self, *settlement: Any, **more: Any) -> bool:
            *what, done = settlement

            def later(outcome: Any) -> None:
                self.answers.append(partial(done, outcome))
                self.settled.set()

            return super().settle_now(*what, later, **more)

    linear(tmp_path / "m" / "1" / "model.onnx")
    log = Late()
    async with running(tmp_path, log=log) as bench:
        intake = bench.service._intake
        for _ in range(2):  # and a second time, when all was quiet once
            for seed in range(2):
                _, record = await bench.accept("m", [Tensor.of("x", x(1, seed))])
                await bench.dispatch("m", [record])
            async with asyncio.timeout(30):
                while len(log.answers) < 2:
                    log.settled.clear()
                    await log.settled.wait()
                waiting = [asyncio.ensure_future(intake.settled()) for _ in range(3)]
                await intake.settled_so_far()
                log.answers.pop()()
                await asyncio.wait(waiting, timeout=0.01)
                assert not any(one.done() for one in waiting)
                log.answers.pop()()
                await asyncio.gather(*waiting)
        assert await log.range(keys.batches(ME)) == []


DYING = """
import os
import sys
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if array[0, 0] == 666:
                for number in range(30):
                    print("line", number, file=sys.stderr)
                os._exit(3)
            if array[0, 0] < 0:
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("negative")))
                continue
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", array + 1)]))
        return answers
"""

HELD = """
import os
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.gate = os.path.join(args["model_repository"], "..", "gate")

    def execute(self, requests):
        with open(self.gate, "rb") as gate:
            gate.read()
        tensors = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", tensor)]) for tensor in tensors]
"""


def python_model(directory: Path, code: str = DYING) -> None:
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.py").write_text(code)
    (directory / "config.pbtxt").write_text(
        'backend: "python" max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: 2 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 2 } instance_group { kind: KIND_CPU count: 1 }'
    )


# -- instances that die ------------------------------------------------------------------------------------------------


async def test_a_python_instance_that_dies_is_told_of_and_made_again(tmp_path: Path) -> None:
    """P19, I13."""
    python_model(tmp_path / "py")
    async with running(tmp_path) as bench:

        async def infer(*values: float) -> list[ResponseRecord]:
            pairs = [
                await bench.accept("py", [Tensor.of("x", np.full((1, 2), value, np.float32))], endpoint=str(values))
                for value in values
            ]
            await bench.dispatch("py", [record for _, record in pairs])
            found = await bench.replies(str(values), len(pairs))
            return [found[request_id] for request_id, _ in pairs]

        first, second = await infer(1, -1)
        assert first.outputs[0].array().tolist() == [[2.0, 2.0]]
        assert isinstance(second.error, CharoniaError)
        assert second.error.message == "negative"
        deadly = [await bench.accept("py", [Tensor.of("x", np.full((1, 2), value, np.float32))]) for value in (1, 666)]
        batch_id = await bench.dispatch("py", [record for _, record in deadly])
        died = await bench.finished("py", batch_id, BatchDied)
        assert re.fullmatch(
            r"Stub process 'py_0_0' is not healthy\. The process \(pid \d+\) exited with code 3\.", died.reason
        )
        assert died.stderr == "\n".join(f"line {number}" for number in range(10, 30))
        assert (died.executor, died.instance, died.blameless) == (ME, "py_0_0", False)
        assert died.ids == b"".join(request_id for request_id, _ in deadly)
        assert await bench.log.unsettled("py", [request_id for request_id, _ in deadly]) == [0, 0]
        assert await bench.log.range(keys.replies("gw")) == []
        (alive,) = await infer(3)
        assert alive.outputs[0].array().tolist() == [[4.0, 4.0]]
        loaded = await bench.control.fact(VersionLoaded)
        stats = await bench.log.statistics(keys.statistics("py", 1, loaded.content_hash))
        assert (stats["success_count"], stats["fail_count"], stats["fail_BACKEND"]) == (2, 1, 1)
        await bench.service.drain(10)
        assert await bench.log.range(keys.batches(ME)) == []
        page = bench.service.metrics.render().decode()
        assert 'charonia_executor_batches_died_total{model="py",version="1"} 1.0' in page
        assert 'charonia_fenced_total{model="py",version="1"} 0.0' in page
