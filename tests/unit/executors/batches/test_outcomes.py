"""What an instance may say beside its arrays: how long it took, which rows failed, which batches it takes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
from instance_pool import MODEL, Doubling, DoublingRequests, Pool
from wave_senders import meta_of_one

from charonia.backend import ColumnOutput, ModelRequest, ModelResponse, Outcome, RequestColumns, Timings
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.eventlog import port
from charonia.models.interface import TensorSpec
from charonia.tensors import Tensor
from charonia.wire import Wave, unpack_response, unpack_wave, unpack_wave_reply, wave_head
from executors.batches import wave_execution
from executors.batches.batch_results import Executed
from executors.batches.wave_execution import ExecutedWaves
from executors.settling.wave_settler import WaveCounts


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
    "which is more than the log takes ({} bytes): only answers to requests that are no jobs, on the machine of their "
    "gateway, may be larger"
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


@pytest.mark.parametrize(
    ("timings", "text"),
    [
        (Timings(1, -5, 3), "the model gave -5 as 'infer_ns' of its timings: times are whole numbers of nanoseconds"),
        (Timings(None, 2, 3), "the model gave None as 'input_ns' of its timings"),  # type: ignore[arg-type]
        (Timings(1, 2, 0.5), "the model gave 0.5 as 'output_ns' of its timings"),  # type: ignore[arg-type]
        (Timings(1, 2, 1 << 64), "the model gave 18446744073709551616 as 'output_ns' of its timings"),
        ((1, 2, 3), "the model gave None as 'input_ns' of its timings"),
    ],
)
async def test_times_that_cannot_be_counted_fail_their_execution(timings: Any, text: str) -> None:
    for instance in (Careful(timings), Sized(timings)):
        under = Pool(instance)
        executed = await asyncio.wait_for(under.run(1, 2), 30)
        for answers in (await answers_of(executed), (await run_wave(under, 1, 2))[1]):
            assert [answer[: len(text)] for answer in answers] == [text, text]
        instance.timings = None
        assert await answers_of(await under.run(1, 2)) == [2, 4]
        await under.pool.close()


async def test_times_may_be_of_numpys_types() -> None:
    under = Pool(Careful(Timings(*np.array([10**12, 5, 10**13]))))
    (run,) = (await asyncio.wait_for(under.run(1, 2), 30)).executions
    assert type(run.input_ns) is type(run.infer_ns) is type(run.output_ns) is int
    assert run.infer_ns == 5
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


def wave(*numbers: float, reply_by_reference: bool = False) -> Wave:
    """One request for each number."""
    data = np.array(numbers, np.float32)
    meta = meta_of_one(Tensor.of("x", data[:1].reshape(1, 1)), "y")
    head = wave_head(
        *(b"p" * 15, len(numbers), b"g-1", meta),
        rows=1,
        signature=7,
        level=0,
        accepted_ns=1,
        reply_by_reference=reply_by_reference,
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


class Leaving(Doubling):
    """Raises what is no `Exception`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def execute(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError("inner")])
async def test_an_exit_is_an_error_of_the_model_and_its_instance_goes_on(error: BaseException) -> None:
    instance = Leaving(error)
    under = Pool(instance)
    async with asyncio.timeout(30):
        for _ in range(2):
            assert await answers_of(await under.run(1)) == [f"{type(error).__name__}: {error}"]
        assert (await run_wave(under, 1, 2))[1] == [f"{type(error).__name__}: {error}"] * 2
    await under.pool.close()


class LeavingRequests(DoublingRequests):
    def __init__(self, error: BaseException | None = None, parameters: Any = None) -> None:
        super().__init__()
        self.error, self.parameters = error, parameters

    async def execute_requests(self, requests: Sequence[ModelRequest]) -> Sequence[ModelResponse]:
        if self.error is not None:
            raise self.error
        return [ModelResponse([Tensor("y", *_of(request))], self.parameters) for request in requests]


def _of(request: ModelRequest) -> tuple[DataType, tuple[int, ...], Any]:
    (given,) = request.inputs
    return given.datatype, given.shape, given.data


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError("upstream")])
async def test_so_it_is_where_requests_run_in_the_event_loop(error: BaseException) -> None:
    under = Pool(LeavingRequests(error))
    async with asyncio.timeout(30):
        for _ in range(2):
            assert await answers_of(await under.run(1)) == [f"{type(error).__name__}: {error}"]
    await under.pool.close()


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"k": [1]}, "response parameter 'k' of model 'm' is a list"),
        ({"k": np.int64(1)}, "response parameter 'k' of model 'm' is a int64"),
        ({1: "v"}, "response parameter 1 of model 'm'"),
        ("word", "gave a str as response parameters, not a dict"),
        ({"k": 1 << 64}, "response parameter 'k' of model 'm' is an int out of range: it may be from -9223372036854"),
        ({"k": -(1 << 63) - 1}, "response parameter 'k' of model 'm' is an int out of range"),
        ({"k": "\ud800"}, "response parameter 'k' of model 'm' is no Unicode text"),
        ({"\udcff": 1}, "response parameter '\\udcff' of model 'm' is no Unicode text"),
    ],
)
async def test_response_parameters_that_no_reader_takes_are_an_error_of_the_model(parameters: Any, text: str) -> None:
    under = Pool(LeavingRequests(parameters=parameters))
    (answer,) = await answers_of(await under.run(1))
    assert text in answer
    await under.pool.close()


class Boasting(DoublingRequests):
    """Gives the second of its requests what cannot be sent."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given

    async def execute_requests(self, requests: Sequence[ModelRequest]) -> Sequence[ModelResponse]:
        answers = [ModelResponse([Tensor("y", *_of(request))], {"p": 1}) for request in requests]
        answers[1] = replace(answers[1], **self.given)
        return answers


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"parameters": {"k": 1 << 64}}, "response parameter 'k' of model 'm' is an int out of range"),
        ({"parameters": {"k": "\ud800"}}, "response parameter 'k' of model 'm' is no Unicode text"),
        ({"error": InvalidArgument("no file 'a\udcff'")}, "no file 'a\\udcff'"),
        ({"error": ValueError("no file 'a\udcff'")}, "ValueError: no file 'a\\udcff'"),
        ({"outputs": [Tensor("y", DataType.FP32, (np.int64(1), 1), bytes(4))]}, "TypeError: can not serialize 'numpy"),
        ({"outputs": None}, "TypeError: object of type 'NoneType' has no len()"),
    ],
)
async def test_a_response_that_cannot_be_sent_fails_its_request_alone(given: dict[str, Any], text: str) -> None:
    under = Pool(Boasting(**given))
    executed = await asyncio.wait_for(under.run(1, 2, 3), 30)
    first, second, third = await answers_of(executed)
    assert (first, third) == (1, 3)
    assert second.startswith(text)
    assert [(one.indices, one.rows) for one in executed.executions] == [((0, 2), 3)]
    assert [one.index for one in executed.failures] == [1]
    waved, answers = await run_wave(under, 1, 2, 3)
    assert (answers[0], answers[2]) == (1, 3)
    assert answers[1].startswith(text)
    assert waved.failed == {0: 1}
    await under.pool.close()


async def test_response_parameters_may_be_of_classes_of_these_types() -> None:
    class Word(StrEnum):
        A = "a"

    parameters = OrderedDict({"score": np.float64(0.5), "word": np.str_("w"), Word.A: Word.A})
    under = Pool(LeavingRequests(parameters=parameters))
    (answer,) = (await under.run(1)).answers
    assert unpack_response(answer).parameters == {"score": 0.5, "word": "w", "a": "a"}
    await under.pool.close()


class Forgetful(Doubling):
    """Gives what is no result."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given

    def execute(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Any:
        return self.given


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, "model 'm' gave a NoneType, not arrays by output name"),
        ([1.0], "model 'm' gave a list, not arrays by output name"),
        ({"y": [1.0]}, "model 'm' gave a list as output 'y', not an array"),
    ],
)
async def test_what_is_no_result_is_named(given: Any, text: str) -> None:
    under = Pool(Forgetful(given))
    assert await answers_of(await under.run(1)) == [text]
    assert (await run_wave(under, 1, 2))[1] == [text, text]
    await under.pool.close()


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
    monkeypatch.setattr(port, "MAX_RECORD_BYTES", len(whole) - 1)
    executed = await under.run(1, 2)
    assert await answers_of(executed) == [f"{TOO_LARGE} {len(whole)} bytes, {REST.format(len(whole) - 1)}"] * 2
    assert [failure.index for failure in executed.failures] == [0, 1]
    assert executed.executions[0].indices == ()
    await under.pool.close()


async def test_of_a_wave_that_the_log_would_not_take_each_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "MAX_RECORD_BYTES", 7)
    under = Pool(Careful())
    executed, answers = await run_wave(under, 1, 2)
    assert executed.failed == {0: 2}
    assert answers == [f"{TOO_LARGE} 8 bytes, {REST.format(7)}"] * 2
    assert executed.executions == []
    await under.pool.close()


class DoublingColumns(DoublingRequests):
    """Doubles, from columns to columns."""

    takes_columns = True

    async def execute_columns(self, columns: RequestColumns) -> list[ColumnOutput]:
        await asyncio.sleep(0)
        doubled = np.frombuffer(columns.inputs[0].data, np.float32) * 2
        return [ColumnOutput("y", DataType.FP32, (1, 1), doubled.tobytes())]

    def cancel_columns(self, columns: RequestColumns, indices: Sequence[int]) -> None:
        """Nothing is cancelled."""


@pytest.mark.parametrize("make", [Doubling, Refusing, DoublingColumns])
async def test_only_the_waves_of_a_run_that_are_too_large_fail(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted as what their callers got."""
    monkeypatch.setattr(port, "MAX_RECORD_BYTES", 7)
    under = Pool(make())
    waves = [wave(1), wave(2, 3), wave(4)]
    _, future = under.run_batch((), waves=waves)
    executed = await asyncio.wait_for(future, 30)
    assert isinstance(executed, ExecutedWaves)
    small = [unpack_wave_reply(executed.answers[index]) for index in (0, 2)]
    assert [np.frombuffer(one.columns[0], "<f4").tolist() for one in small] == [[2], [8]]
    assert not executed.answers[1]
    assert await answers_of(Executed(executed.singly[1])) == [f"{TOO_LARGE} 8 bytes, {REST.format(7)}"] * 2
    assert executed.singly.keys() == executed.failed.keys() == {1}
    assert [failure.index for failure in executed.failures] == [1, 1]
    assert [(one.indices, one.rows) for one in executed.executions] == [((0, 2), 4)]
    counts = WaveCounts()
    counts.executed(executed.executions[0], waves, executed.failed)
    counts.failed(executed.failures, waves)
    assert (counts.increments()["success_count"], counts.increments()["fail_count"]) == (2, 2)
    await under.pool.close()


async def test_a_wave_whose_answers_cannot_be_packed_leaves_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = wave_execution.pack_wave_reply

    def fails_for_two(prefix: bytes, count: int, *more: Any) -> bytes:
        if count == 2:
            raise MemoryError
        return pack(prefix, count, *more)

    monkeypatch.setattr(wave_execution, "pack_wave_reply", fails_for_two)
    for make in (Doubling, Refusing, DoublingColumns):
        under = Pool(make())
        _, future = under.run_batch((), waves=[wave(1), wave(2, 3)])
        executed = await asyncio.wait_for(future, 30)
        assert isinstance(executed, ExecutedWaves)
        assert np.frombuffer(unpack_wave_reply(executed.answers[0]).columns[0], "<f4").tolist() == [2]
        assert await answers_of(Executed(executed.singly[1])) == ["MemoryError: "] * 2
        assert (executed.failed, [one.indices for one in executed.executions]) == ({1: 2}, [(0,)])
        await under.pool.close()


async def test_of_a_wave_that_is_answered_singly_only_requests_that_are_too_large_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their answers may have gone by reference, and there was no room for them."""

    class Growing(DoublingRequests):
        async def execute_requests(self, requests: Sequence[ModelRequest]) -> Sequence[ModelResponse]:
            found = []
            for request in requests:
                size = int(request.inputs[0].array()[0, 0])
                found.append(ModelResponse([Tensor.of("y", np.zeros((1, 1), np.float32))], {"p": "x" * size}))
            return found

    monkeypatch.setattr(port, "MAX_RECORD_BYTES", 1000)
    stored: list[Wave] = []

    def no_room(one: Wave, columns: Sequence[Any]) -> None:
        stored.append(one)

    monkeypatch.setattr(wave_execution, "BY_REFERENCE_BYTES", 1)
    under = Pool(Growing())
    waves = [wave(5, 5000, 7, reply_by_reference=True)]
    _, future = under.run_batch((), waves=waves, put_columns=no_room)
    executed = await asyncio.wait_for(future, 30)
    assert isinstance(executed, ExecutedWaves)
    assert len(stored) == 3
    found = [unpack_response(one) for one in executed.singly[0]]
    assert [one.error is None for one in found] == [True, False, True]
    assert str(found[1].error).startswith(f"{TOO_LARGE} 50")
    assert executed.failed == {0: 1}
    assert executed.succeeded(0, 0, 3) == 2
    counts = WaveCounts()
    counts.executed(executed.executions[0], waves, executed.failed, executed.shares[0])
    counts.failed(executed.failures, waves)
    assert (counts.increments()["success_count"], counts.increments()["fail_count"]) == (2, 1)
    await under.pool.close()


async def test_of_strings_that_are_too_large_only_their_requests_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strings(Doubling):
        def execute(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Mapping[str, Any]:
            return {"y": np.array([[b"x" * int(size)] for size in inputs["x"].ravel()], object)}

    monkeypatch.setattr(port, "MAX_RECORD_BYTES", 1000)
    interface = replace(MODEL, outputs={"y": TensorSpec("y", DataType.BYTES, (1,))})
    monkeypatch.setattr("instance_pool.MODEL", interface)
    under = Pool(Strings())
    _, future = under.run_batch((), waves=[wave(5, 5000, 7)])
    executed = await asyncio.wait_for(future, 30)
    assert isinstance(executed, ExecutedWaves)
    found = [unpack_response(one) for one in executed.singly[0]]
    assert [one.error is None for one in found] == [True, False, True]
    assert executed.failed == {0: 1}
    assert [failure.batch_rows for failure in executed.failures] == [3]
    assert executed.succeeded(0, 0, 3) == 2
    await under.pool.close()


async def test_a_large_answer_to_the_only_request_of_a_wave_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It might have gone by reference, and there was no room for it."""

    class Bare(DoublingRequests):
        async def execute_requests(self, requests: Sequence[ModelRequest]) -> Sequence[ModelResponse]:
            return [ModelResponse(one.outputs) for one in await super().execute_requests(requests)]

    monkeypatch.setattr(port, "MAX_RECORD_BYTES", 3)
    monkeypatch.setattr(wave_execution, "BY_REFERENCE_BYTES", 4)
    under = Pool(Bare())
    _, future = under.run_batch((), waves=[wave(1, reply_by_reference=True)], put_columns=lambda *_: None)
    executed = await asyncio.wait_for(future, 30)
    assert isinstance(executed, ExecutedWaves)
    ((answer,),) = executed.singly.values()
    assert str(unpack_response(answer).error).startswith(TOO_LARGE)
    assert (executed.failed, executed.executions) == ({0: 1}, [])
    await under.pool.close()
