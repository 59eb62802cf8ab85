"""What an instance may say beside its arrays: how long it took, which rows failed, which batches it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from instance_pool import Doubling, Pool
from wave_senders import meta_of_one

from charonia.backend import Outcome, Timings
from charonia.errors import InvalidArgument
from charonia.tensors import Tensor
from charonia.wire import Wave, unpack_response, unpack_wave, unpack_wave_reply, wave_head
from executors.batches import batch_results, execution, wave_execution
from executors.batches.batch_results import Executed
from executors.batches.wave_execution import ExecutedWaves


class Careful(Doubling):
    """Fails the rows that are below 0 alone; all rows of a batch with a 77."""

    def __init__(self, timings: Timings | None = None) -> None:
        super().__init__()
        self.timings = timings
        self.batches: list[list[float]] = []

    def execute(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Any:
        x = inputs["x"]
        self.batches.append(x.ravel().tolist())
        if 77 in x:
            raise InvalidArgument("no 77")
        failures: Any = {row: InvalidArgument(f"row {row} is below 0") for row, value in enumerate(x) if value < 0}
        if -99 in x:
            failures = {len(x): InvalidArgument("beyond")}
        return Outcome(super().execute(inputs, outputs), self.timings, failures)


TOO_LARGE = "the answer of model 'm' has"
REST = (
    f"which is more than the log takes ({batch_results.MAX_RECORD_BYTES} bytes): only answers to requests that are no "
    "jobs, on the machine of their gateway, may be larger"
)


class Refusing(Careful):
    rows_fail_alone = True


class Sized(Careful):
    batch_sizes = (1, 4)


async def answers_of(executed: Executed) -> list[Any]:
    found = [unpack_response(answer) for answer in executed.answers]
    return [one.error.message if one.error is not None else float(one.outputs[0].array()[0, 0]) for one in found]


async def test_requests_with_a_failed_row_fail_alone() -> None:
    instance = Careful()
    under = Pool(instance)
    executed = await under.run(1, -2, 3)
    assert await answers_of(executed) == [2, "row 1 is below 0", 6]
    assert [(one.indices, one.rows) for one in executed.executions] == [((0, 2), 3)]
    assert [failure.index for failure in executed.failures] == [1]
    assert len(instance.batches) == 1
    executed = await under.run(-1, -2)
    assert await answers_of(executed) == ["row 0 is below 0", "row 1 is below 0"]
    assert executed.executions == []
    await under.pool.close()


async def test_a_failed_row_that_is_not_there_fails_the_batch() -> None:
    under = Pool(Careful())
    assert await answers_of(await under.run(1, -99)) == ["model 'm' failed rows [2] of a batch of 2"] * 2
    await under.pool.close()


async def test_a_batch_that_fails_runs_again_one_by_one_where_the_instance_wants_it() -> None:
    instance = Refusing()
    under = Pool(instance)
    assert await answers_of(await under.run(1, 77, 3)) == [2, "no 77", 6]
    assert instance.batches == [[1, 77, 3], [1], [77], [3]]
    assert await answers_of(await under.run(77)) == ["no 77"]
    assert len(instance.batches) == 5
    await under.pool.close()


async def test_what_the_instance_says_of_its_time_is_counted() -> None:
    under = Pool(Careful(Timings(10**12, 5, 10**13)))
    (run,) = (await under.run(1, 2)).executions
    assert 10**12 <= run.input_ns < 10**12 + 10**11
    assert run.infer_ns == 5
    assert 10**13 <= run.output_ns < 10**13 + 10**12
    await under.pool.close()


async def test_batches_have_the_sizes_of_the_instance() -> None:
    instance = Sized()
    under = Pool(instance)
    executed = await under.run(1, 2, 3)
    assert await answers_of(executed) == [2, 4, 6]
    assert executed.executions[0].rows == 3
    assert await answers_of(await under.run(5)) == [10]
    assert instance.batches == [[1, 2, 3, 3], [5]]
    await under.pool.close()


def wave(*numbers: float) -> Wave:
    """One request for each number."""
    data = np.array(numbers, np.float32)
    meta = meta_of_one(Tensor.of("x", data[:1].reshape(1, 1)), "y")
    head = wave_head(
        *(b"p" * 15, len(numbers), b"g-1", meta), rows=1, signature=7, level=0, accepted_ns=1, reply_by_reference=False
    )
    return unpack_wave(head + data.tobytes())


async def run_wave(under: Pool, *numbers: float) -> tuple[ExecutedWaves, list[Any]]:
    """Runs one wave; answers come as columns, or one by one."""
    _, future = under.run_batch((), waves=[wave(*numbers)])
    executed = await asyncio.wait_for(future, 30)
    assert isinstance(executed, ExecutedWaves)
    if executed.answers[0]:
        return executed, np.frombuffer(unpack_wave_reply(executed.answers[0]).columns[0], "<f4").tolist()
    return executed, await answers_of(Executed(executed.singly[0]))


async def test_requests_of_a_wave_fail_alone_too() -> None:
    for instance, bad, text in ((Careful(), -1.0, "row 1 is below 0"), (Refusing(), 77.0, "no 77")):
        under = Pool(instance)
        executed, answers = await run_wave(under, 1, bad, 3)
        assert answers == [2, text, 6]
        assert executed.failed == {0: 1}
        assert (await run_wave(under, 1, 2))[1] == [2, 4]
        await under.pool.close()


async def test_waves_have_the_sizes_and_times_of_the_instance() -> None:
    instance = Sized(Timings(10**12, 5, 10**13))
    under = Pool(instance)
    executed, answers = await run_wave(under, 1, 2)
    assert answers == [2, 4]
    assert instance.batches == [[1, 2, 2, 2]]
    (run,) = executed.executions
    assert (run.rows, run.infer_ns) == (2, 5)
    assert run.input_ns >= 10**12
    assert run.output_ns >= 10**13
    await under.pool.close()


async def test_an_answer_that_the_log_would_not_take_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    under = Pool(Careful())
    (whole,) = (await under.run(1)).answers
    for module in (execution, wave_execution):
        monkeypatch.setattr(module, "MAX_RECORD_BYTES", len(whole) - 1)
    executed = await under.run(1, 2)
    assert await answers_of(executed) == [f"{TOO_LARGE} {len(whole)} bytes, {REST}"] * 2
    assert [failure.index for failure in executed.failures] == [0, 1]
    assert executed.executions[0].indices == ()
    await under.pool.close()


async def test_of_a_wave_that_the_log_would_not_take_each_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wave_execution, "MAX_RECORD_BYTES", 7)
    monkeypatch.setattr(wave_execution, "BY_REFERENCE_BYTES", 4)
    under = Pool(Careful())
    executed, answers = await run_wave(under, 1, 2)
    assert executed.failed == {0: 2}
    assert answers == [f"{TOO_LARGE} 8 bytes, {REST}"] * 2
    await under.pool.close()
