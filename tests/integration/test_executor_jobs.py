"""How an executor settles jobs and journalled requests (ADR 0004), and what it does with what nobody wants any more."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executor_bench import ME, Bench, Follower, linear, running, x
from memory_log.log import MemoryLog
from onnx import TensorProto, helper, numpy_helper, save

from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import LogUnavailable
from charonia.facts.events import BatchDied, BatchReturned, VersionLoaded
from charonia.facts.jobs import JobState
from charonia.facts.journal import JournalFact, read_facts
from charonia.facts.processor_use import BATCHER_APART, BATCHER_HERE
from charonia.tensors import Tensor
from charonia.wire import FLAG_JOB, FLAG_JOURNALLED, records_of, unpack_response

DURABLE = FLAG_JOB | FLAG_JOURNALLED


async def journal(bench: Bench, model: str) -> list[JournalFact]:
    return [fact for entry in await bench.log.range(keys.journal(model)) for fact in read_facts(entry.fields)]


async def statistics(bench: Bench, model: str) -> dict[str, int]:
    loaded = await bench.control.fact(VersionLoaded, model=model)
    return await bench.log.statistics(keys.statistics(model, 1, loaded.content_hash))


def fenced(bench: Bench, model: str) -> str:
    start = f'charonia_fenced_total{{model="{model}"'
    lines = bench.service.metrics.render().decode().splitlines()
    return next(line.split()[-1] for line in lines if line.startswith(start))


async def test_jobs_and_keyless_requests_of_one_batch_each_end_as_they_should(tmp_path: Path) -> None:
    linear(tmp_path / "linear" / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        tensors = [Tensor.of("x", x(1))]
        keyless, keyless_record = await bench.accept("linear", tensors)
        good, good_record = await bench.accept("linear", tensors, flags=DURABLE)
        bad, bad_record = await bench.accept("linear", [Tensor.of("x", x(1).astype(np.float64))], flags=DURABLE)
        late, late_record = await bench.accept("linear", tensors, flags=DURABLE, deadline_ns=wall_ns() - 1)
        batch_id = await bench.dispatch("linear", [keyless_record, good_record, bad_record, late_record])
        await bench.finished("linear", batch_id)
        found = await bench.replies("gw", 4)
        assert found.keys() == {keyless, good, bad, late}
        entries = await bench.log.range(keys.replies("gw"))
        # with the settlement the keyless one, after it the jobs
        assert [len(records_of(entry.fields)) for entry in entries] == [1, 3]
        assert await bench.log.pending("linear") == (0, 0)

        job = await bench.log.job("linear", good)
        assert job is not None
        assert job.state is JobState.SUCCEEDED
        last = job.events[-1]
        assert last.kind == "succeeded"
        assert last.detail["executor"] == ME
        assert last.detail["batch_id"] == batch_id
        assert last.detail["batch_rows"] == 2
        assert last.detail["attempt"] == 0
        assert last.detail["queue_us"] >= 0
        assert last.detail["infer_us"] > 0
        assert abs(last.detail["start_us"] - wall_ns() // 1000) < 60_000_000
        result = await bench.log.job_result("linear", good)
        assert result is not None
        assert unpack_response(result).outputs[0].array().tolist() == found[good].outputs[0].array().tolist()

        failed = await bench.log.job("linear", bad)
        assert failed is not None
        assert failed.state is JobState.FAILED
        assert "expects 'FP32'" in failed.events[-1].detail["error"]
        result = await bench.log.job_result("linear", bad)
        assert result is not None
        assert unpack_response(result).error is not None
        expired = await bench.log.job("linear", late)
        assert expired is not None
        assert expired.state is JobState.EXPIRED

        told = await journal(bench, "linear")
        (started,) = [fact for fact in told if fact.kind == "started"]
        assert started == JournalFact("started", (good,), (0,), (), ME, batch_id, use=started.use)
        (ended,) = [fact for fact in told if fact.kind == "ended"]
        assert ended.ids == (good, bad, late)
        assert ended.outcomes == (JobState.SUCCEEDED, JobState.FAILED, JobState.EXPIRED)
        assert told.index(started) < told.index(ended)
        counts = await statistics(bench, "linear")
        assert (counts["success_count"], counts["fail_count"]) == (2, 2)
        assert fenced(bench, "linear") == "0.0"
        page = bench.service.metrics.render().decode()
        # somebody waits for all of them: whoever does, counts them
        assert 'nv_inference_request_success_total{model="linear"' not in page
        assert 'nv_inference_request_success{model="linear",version="1"} 0.0' in page


async def test_jobs_nobody_waits_for_are_counted_here(tmp_path: Path) -> None:
    linear(tmp_path / "linear" / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        tensors, broken = [Tensor.of("x", x(1))], [Tensor.of("x", x(1).astype(np.float64))]
        accepted = [
            await bench.accept("linear", given, flags=DURABLE, endpoint="") for given in (tensors, tensors, broken)
        ]
        for endpoint in (keys.ensemble_endpoint("e"), "executor-other", "gateway-g"):  # gateways count their own
            accepted.append(await bench.accept("linear", tensors, endpoint=endpoint))
        batch_id = await bench.dispatch("linear", [record for _, record in accepted])
        await bench.finished("linear", batch_id)
        page = bench.service.metrics.render().decode()
        assert 'nv_inference_request_success{model="linear",version="1"} 4.0' in page
        assert 'nv_inference_request_failure{model="linear",reason="OTHER",version="1"} 1.0' in page
        duration = next(line for line in page.splitlines() if line.startswith("nv_inference_request_duration_us{"))
        assert float(duration.split()[-1]) > 0


async def test_a_job_that_was_ended_by_somebody_else_gets_no_reply_from_here(tmp_path: Path) -> None:
    linear(tmp_path / "linear" / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        tensors = [Tensor.of("x", x(1))]
        cancelled, cancelled_record = await bench.accept("linear", tensors, flags=DURABLE)
        going, going_record = await bench.accept("linear", tensors, flags=DURABLE)
        await bench.log.settle("linear", [(cancelled, 0)], None, [])
        await bench.dispatch("linear", [cancelled_record, going_record])
        assert (await bench.replies("gw", 1)).keys() == {going}
        await bench.service.drain(10)
        assert (await bench.replies("gw", 1)).keys() == {going}
        assert (await statistics(bench, "linear"))["success_count"] == 1
        assert fenced(bench, "linear") == "1.0"


@pytest.mark.parametrize("flags", [0, FLAG_JOURNALLED, DURABLE])
async def test_what_was_won_of_a_batch_is_counted_where_it_is_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int
) -> None:
    """An executor that is killed just then could not count it later."""
    linear(tmp_path / "linear" / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        tensors = [[Tensor.of("x", x(rows))] for rows in (1, 2, 1)]
        accepted = [await bench.accept("linear", one, flags=flags) for one in tensors]
        await bench.log.settle("linear", [(accepted[1][0], 0)], None, [])

        async def later(*_: object) -> None:
            raise AssertionError("it is counted by another write")

        monkeypatch.setattr(bench.log, "add_statistics", later)
        batch_id = await bench.dispatch("linear", [record for _, record in accepted])
        await bench.finished("linear", batch_id)
        await bench.service.drain(10)
        counts = await statistics(bench, "linear")
        assert (counts["success_count"], counts["inference_count"], counts["execution_count"]) == (2, 2, 1)
        page = bench.service.metrics.render().decode()
        assert 'nv_inference_count{model="linear",version="1"} 2.0' in page
        assert fenced(bench, "linear") == "1.0"


async def test_in_order_only_won_jobs_reach_the_owner(tmp_path: Path) -> None:
    """S6."""
    linear(tmp_path / "linear" / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        tensors = [Tensor.of("x", x(1))]
        cancelled, cancelled_record = await bench.accept("linear", tensors, flags=DURABLE)
        keyless, keyless_record = await bench.accept("linear", tensors)
        going, going_record = await bench.accept("linear", tensors, flags=DURABLE)
        await bench.log.settle("linear", [(cancelled, 0)], None, [])
        records = [cancelled_record, keyless_record, going_record]
        batch_id = await bench.dispatch("linear", records, via_owner=True)
        fact = await bench.finished("linear", batch_id)
        assert [unpack_response(record).id for _, record in fact.replies] == [keyless, going]
        await bench.service.drain(10)
        assert await bench.log.range(keys.replies("gw")) == []
        assert await bench.log.pending("linear") == (0, 0)
        assert (await statistics(bench, "linear"))["success_count"] == 2


class Forgetful(MemoryLog):
    """Does what it is told, but says so only the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.settlements = 0

    async def settle(self, *args: Any, **kwargs: Any) -> list[bool]:
        self.settlements += 1
        won = await super().settle(*args, **kwargs)
        if self.settlements == 1:
            raise LogUnavailable("the answer was lost")
        return won


async def test_a_settlement_whose_answer_was_lost_is_ours_all_the_same(tmp_path: Path) -> None:
    linear(tmp_path / "linear" / "1" / "model.onnx")
    log = Forgetful()
    async with running(tmp_path, log=log) as bench:
        job, record = await bench.accept("linear", [Tensor.of("x", x(1))], flags=DURABLE)
        await bench.dispatch("linear", [record])
        assert (await bench.replies("gw", 1)).keys() == {job}
        assert log.settlements == 2
        assert fenced(bench, "linear") == "0.0"


PATIENT = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if array[0, 0] < 0:
                print("waiting", flush=True)
                while not request.is_cancelled():
                    time.sleep(0.001)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", array + 1)]))
        return answers
"""


def python_model(directory: Path, code: str, config: str = "") -> None:
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.py").write_text(code)
    (directory / "config.pbtxt").write_text(
        'backend: "python" max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: 2 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 2 } instance_group { kind: KIND_CPU count: 1 } ' + config
    )


@pytest.mark.parametrize("local", [False, True])
async def test_a_running_python_model_sees_that_a_request_is_unwanted(tmp_path: Path, local: bool) -> None:
    python_model(tmp_path / "py", PATIENT)
    async with running(tmp_path, hosts_batcher=local) as bench:
        fine, fine_record = await bench.accept("py", [Tensor.of("x", np.ones((1, 2), np.float32))])
        endless, endless_record = await bench.accept(
            "py", [Tensor.of("x", np.full((1, 2), -1, np.float32))], flags=DURABLE
        )
        queued, queued_record = await bench.accept("py", [Tensor.of("x", np.full((1, 2), -1, np.float32))])
        first = await bench.dispatch("py", [fine_record, endless_record])
        # of the second batch nothing is left to run: it only frees its slot
        second = await bench.dispatch("py", [queued_record])
        told = Follower(bench.log, keys.journal("py"))
        await told.until(
            lambda: any(fact.kind == "started" for entry in told.entries for fact in read_facts(entry.fields))
        )
        uses = [fact.use for entry in told.entries for fact in read_facts(entry.fields) if fact.use is not None]
        assert [use.batcher for use in uses] == [BATCHER_HERE if local else BATCHER_APART]
        await bench.log.settle("py", [(endless, 0), (queued, 0)], None, [])
        await bench.unwant(second, queued)
        await bench.unwant(first, endless)
        await bench.finished("py", first)
        await bench.finished("py", second)
        assert (await bench.replies("gw", 1)).keys() == {fine}
        await bench.service.drain(10)
        assert (await bench.replies("gw", 1)).keys() == {fine}
        counts = await statistics(bench, "py")
        assert (counts["success_count"], counts["execution_count"]) == (1, 1)
        assert fenced(bench, "py") == "0.0"  # it was told
        assert await bench.log.range(keys.batches(ME)) == []


LONG = 3_000_000
"""Iterations that take some seconds and end before the test does: a process cannot end well while a thread hangs."""


def threads_end() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("instance endless"):
            thread.join()


def endless(path: Path) -> None:
    """y = x after x[0] iterations of nothing."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["going_on"]),
            helper.make_node("Add", ["value", "nought"], ["next"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("count", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("going_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, [1]),
        ],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x"], ["times"], to=TensorProto.INT64),
            helper.make_node("Loop", ["times", "", "x"], ["y"], body=body),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        [numpy_helper.from_array(np.zeros(1, np.float32), "nought")],
    )
    path.parent.mkdir(parents=True)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    (path.parents[1] / "config.pbtxt").write_text(
        'parameters { key: "charonia.max_execution_s" value { string_value: "0.5" } } '
        "instance_group { kind: KIND_CPU count: 1 }"
    )


async def test_a_native_batch_that_hangs_is_told_of_and_the_executor_asks_to_end(tmp_path: Path) -> None:
    endless(tmp_path / "endless" / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        failed = asyncio.Event()
        bench.service.on_failure = failed.set
        hanging, hanging_record = await bench.accept("endless", [Tensor.of("x", np.full(1, LONG, np.float32))])
        _, queued_record = await bench.accept("endless", [Tensor.of("x", np.ones(1, np.float32))])
        hung = await bench.dispatch("endless", [hanging_record])
        queued = await bench.dispatch("endless", [queued_record])
        await asyncio.wait_for(failed.wait(), 30)
        died = await bench.finished("endless", hung, BatchDied)
        assert died.reason == "it exceeded max_execution_s (0.5 s)"
        assert (died.instance, died.ids, died.blameless) == ("endless_0_0", hanging, False)
        assert "session.run" in died.stderr
        assert bench.service.failed
        assert await bench.service.drain(10)
        assert (await bench.finished("endless", queued, BatchReturned)).reason == "executor drains"
        assert await bench.log.range(keys.batches(ME)) == []
        await bench.service.close(0.1)
    threads_end()


async def test_of_a_hanging_batch_its_next_owner_is_told_when_the_batcher_ends_as_well(tmp_path: Path) -> None:
    endless(tmp_path / "endless" / "1" / "model.onnx")
    async with running(tmp_path, hosts_batcher=True) as bench:
        failed = asyncio.Event()
        bench.service.on_failure = failed.set
        _, record = await bench.accept("endless", [Tensor.of("x", np.full(1, LONG, np.float32))])
        await bench.dispatch("endless", [record])
        await asyncio.wait_for(failed.wait(), 30)
        await bench.service.drain(10)
        await bench.service.close(0.1)
        assert [f for f in Follower(bench.log, keys.facts("endless")).facts() if isinstance(f, BatchDied)] == []
        await bench.service.report_hung_batches()
        await Follower(bench.log, keys.facts("endless")).fact(BatchDied)
    threads_end()


MIXED = """
import os
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        if any(array[0, 0] == 666 for array in arrays):
            os.kill(os.getpid(), 11)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array + 1)]) for array in arrays]
"""


@pytest.mark.parametrize("via_owner", [False, True])
async def test_what_was_answered_before_the_death_is_settled_unless_it_needs_its_order(
    tmp_path: Path, via_owner: bool
) -> None:
    """A batch of more rows than the model takes runs in parts: the first one is done when the second one dies."""
    python_model(tmp_path / "py", MIXED)
    async with running(tmp_path) as bench:
        rows = [Tensor.of("x", np.full((3, 2), value, np.float32)) for value in (1, 666)]
        (done, done_record), (deadly, deadly_record) = [await bench.accept("py", [t], flags=DURABLE) for t in rows]
        batch_id = await bench.dispatch("py", [done_record, deadly_record], via_owner=via_owner)
        died = await bench.finished("py", batch_id, BatchDied)
        assert "(SIGSEGV)" in died.reason
        assert "Segmentation fault" in died.stderr
        assert not died.blameless
        if via_owner:
            assert died.ids == done + deadly
            assert await bench.log.unsettled("py", [done, deadly]) == [0, 0]
        else:
            assert died.ids == deadly
            assert (await bench.replies("gw", 1)).keys() == {done}
            assert await bench.log.unsettled("py", [done, deadly]) == [-1, 0]
        await bench.service.drain(10)
        assert (await statistics(bench, "py")).get("success_count", 0) == (0 if via_owner else 1)
