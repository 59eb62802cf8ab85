"""A batch of waves is answered and counted as the same requests are one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from instance_pool import BROKEN, DEADLY, MODEL, WRONG, Doubling, DoublingRequests

from charonia.backend import InstanceDied
from charonia.datatypes import DataType
from charonia.errors import ErrorCode, InternalError, InvalidArgument
from charonia.models.interface import TensorSpec
from charonia.tensors import Buffer, Tensor, join_bytes_elements
from charonia.wire import (
    FILE,
    Reference,
    RequestRecord,
    ResponseRecord,
    Wave,
    request_meta,
    unpack_response,
    unpack_wave,
    unpack_wave_reply,
    wave_head,
)
from executors.batches import wave_execution
from executors.batches.assembly import Planner, Workspace
from executors.batches.batch_results import OTHER, Executed, Failure
from executors.batches.execution import Batch
from executors.batches.wave_execution import ExecutedWaves, WaveBatch
from executors.settling.settlement import increments
from executors.settling.wave_settler import WaveCounts

SIX = replace(MODEL, max_batch_size=6)
STRINGS = replace(
    SIX,
    inputs={"x": TensorSpec("x", DataType.BYTES, (1,)), "n": TensorSpec("n", DataType.INT32, (2,))},
    outputs={"y": TensorSpec("y", DataType.BYTES, (1,)), "m": TensorSpec("m", DataType.INT32, (2,))},
    required_inputs=frozenset(("x", "n")),
)


def wave_increments(waves: Sequence[Wave], executed: ExecutedWaves) -> dict[str, int]:
    """What executed waves add to the statistics."""
    counts = WaveCounts()
    for place, execution in enumerate(executed.executions):
        counts.executed(execution, waves, executed.failed, executed.shares.get(place))
    counts.failed(executed.failures, waves)
    return counts.increments()


class Echo:
    """Gives back what it gets, in capitals."""

    def execute(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Mapping[str, Any]:
        made = {"m": inputs["n"] + 1}
        made["y"] = np.array([[one[0].upper()] for one in inputs["x"]], object)
        return made

    def close(self) -> None: ...


PLACES: dict[str, bytes] = {}
"""What lies beside the log, by name."""


def put(wave: Wave, columns: Sequence[Buffer]) -> Reference | None:
    """Put answers beside the log whose gateway reads them there."""
    if not wave.reply_by_reference:
        return None
    reference = Reference(FILE, f"e/{len(PLACES)}", sum(map(len, columns)))
    PLACES[reference.name] = b"".join(columns)
    return reference


def fetch(reference: Reference) -> bytes:
    return PLACES[reference.name]


def wave_of(
    number: int, columns: list[list[Tensor]], outputs: tuple[str, ...] = (), *, by_reference: bool = False
) -> Wave:
    """A wave of requests with equally many rows; `columns` are by input."""
    count = len(columns[0])
    meta = request_meta(1, "", [column[0] for column in columns], outputs, {})
    strings = any(tensor.datatype is DataType.BYTES for tensor in (column[0] for column in columns))
    about = {"rows": columns[0][0].shape[0], "signature": 7, "level": 0, "accepted_ns": number}
    if by_reference and number % 2 and len(columns) == 1:  # all of them in one slot
        head = wave_head(
            *(bytes([number]) * 15, count, b"gw", meta),
            **about,
            column_at=Reference(FILE, "g/s1-1-1000", count * meta.size_bytes),
            reply_by_reference=True,
        )
        wave = unpack_wave(head)
        wave.columns = (b"".join([bytes(tensor.data) for tensor in columns[0]]),)
        return wave
    if by_reference:
        references = [Reference(FILE, "g/s1-1-1000", meta.size_bytes)] * count
        head = wave_head(
            *(bytes([number]) * 15, count, b"gw", meta), **about, references=references, reply_by_reference=True
        )
        wave = unpack_wave(head)
        wave.payloads = tuple([b"".join([bytes(t.data) for t in inputs]) for inputs in zip(*columns, strict=True)])
        return wave
    head = wave_head(
        *(bytes([number]) * 15, count, b"gw", meta),
        **about,
        sizes=[[len(tensor.data) for tensor in column] for column in columns] if strings else (),
    )
    return unpack_wave(b"".join([head, *[bytes(tensor.data) for column in columns for tensor in column]]))


def numbers_wave(
    number: int, values: list[float], outputs: tuple[str, ...] = (), *, by_reference: bool = False
) -> Wave:
    tensors = [Tensor.of("x", np.full((1, 1), value, np.float32)) for value in values]
    return wave_of(number, [tensors], outputs, by_reference=by_reference)


def strings_wave(number: int, values: list[bytes]) -> Wave:
    strings = [Tensor("x", DataType.BYTES, (1, 1), value) for value in values]
    counts = [Tensor.of("n", np.full((1, 2), at, np.int32)) for at in range(len(values))]
    return wave_of(number, [strings, counts])


def said(response: ResponseRecord) -> tuple[object, ...]:
    """What a caller sees of a response."""
    outputs = [(t.name, t.datatype, t.shape, bytes(t.data)) for t in response.outputs]
    error = (response.error.code, response.error.message) if response.error is not None else None
    return response.id, response.model, response.version, outputs, response.parameters, error


def answers_of(waves: list[Wave], executed: ExecutedWaves) -> list[list[tuple[object, ...]]]:
    """By wave what its callers see, whichever way it is answered; empty where it has no outcome."""
    found = []
    for index, (wave, answer) in enumerate(zip(waves, executed.answers, strict=True)):
        told = []
        if answer:
            assert index not in executed.singly
            reply = unpack_wave_reply(answer)
            assert (reply.prefix, reply.count) == (wave.prefix, wave.count)
            assert (reply.reference is not None) == wave.reply_by_reference
            if reply.reference is not None:
                reply.read_columns(fetch(reply.reference))
            for at, request_id in enumerate(wave.ids()):
                outputs = [
                    Tensor(p.name, p.datatype, p.shape, column[at * p.size_bytes : (at + 1) * p.size_bytes])
                    for p, column in zip(reply.outputs, reply.columns, strict=True)
                ]
                told.append(said(ResponseRecord(request_id, reply.model, reply.version, outputs, {}, None)))
        else:
            told = [said(unpack_response(record, fetch)) for record in executed.singly.get(index, [])]
        found.append(told)
    return found


def counted(increments: dict[str, int]) -> dict[str, int]:
    """Without the durations, which differ from run to run."""
    return {name: n for name, n in increments.items() if not name.endswith("_ns") and not name.startswith("last_")}


_values = st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0, WRONG, BROKEN]), min_size=1, max_size=6)
_outputs = st.sampled_from([(), ("y",)])


@given(st.lists(st.tuples(_values, _outputs, st.booleans()), min_size=1, max_size=4))
def test_arrays_of_waves(made: list[tuple[list[float], tuple[str, ...], bool]]) -> None:
    """What waves share a run is told by what went wrong there: those that run together fail together."""
    planner = Planner(SIX)
    waves = [
        numbers_wave(number + 1, values, outputs, by_reference=by_reference)
        for number, (values, outputs, by_reference) in enumerate(made)
    ]
    batch = WaveBatch(planner, 1, waves, put)
    with patch.object(wave_execution, "BY_REFERENCE_BYTES", 1):
        executed = batch.run_on(Doubling(), Workspace())
    assert isinstance(executed, ExecutedWaves)
    runs: list[list[Wave]] = []
    rows = 0
    for wave in waves:
        if not runs or rows + wave.count > 6:
            runs.append([])
            rows = 0
        runs[-1].append(wave)
        rows += wave.count
    expected: list[tuple[object, ...]] = []
    totals: dict[str, int] = {}
    for run in runs:
        records = [record for wave in run for record in wave.requests()]
        alone = Batch(planner, 1, records)
        answers = alone.run_on(Doubling(), Workspace()).answers
        expected += [said(unpack_response(answer)) for answer in answers]
        for name, amount in counted(increments(records, alone.executed)).items():
            totals[name] = totals.get(name, 0) + amount
    assert [one for told in answers_of(waves, executed) for one in told] == expected
    assert counted(wave_increments(waves, executed)) == totals


@given(st.lists(st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 3), (3, 1)]), min_size=1, max_size=6))
def test_waves_whose_requests_have_other_numbers_of_rows(made: list[tuple[int, int]]) -> None:
    """`made` are requests and the rows of each, wave by wave."""
    waves = []
    for number, (count, rows) in enumerate(made, 1):
        arrays = [np.full((rows, 1), 10 * number + at, np.float32) for at in range(count)]
        waves.append(wave_of(number, [[Tensor.of("x", array) for array in arrays]]))
    planner = Planner(replace(MODEL, max_batch_size=18))
    executed = WaveBatch(planner, 1, waves, put).run_on(Doubling(), Workspace())
    assert isinstance(executed, ExecutedWaves)
    alone = Batch(planner, 1, [record for wave in waves for record in wave.requests()]).run_on(Doubling(), Workspace())
    expected = [said(unpack_response(answer)) for answer in alone.answers]
    assert [one for told in answers_of(waves, executed) for one in told] == expected


GONE = "the request's tensors, which are stored outside the log, cannot be read"


def test_a_request_whose_tensors_are_gone_fails_and_no_other() -> None:
    waves = [numbers_wave(2, [1.0, 2.0], by_reference=True), numbers_wave(4, [3.0])]
    waves[0].payloads = (waves[0].payloads[0], b"")
    executed = WaveBatch(Planner(SIX), 1, waves, put).run_on(Doubling(), Workspace())
    assert isinstance(executed, ExecutedWaves)
    gone, other = answers_of(waves, executed)
    assert [error for *_, error in gone] == [None, (ErrorCode.UNAVAILABLE, GONE)]
    assert [error for *_, error in other] == [None]


def test_a_wave_whose_slot_is_gone_fails_and_no_other() -> None:
    waves = [numbers_wave(1, [1.0, 2.0], by_reference=True), numbers_wave(2, [3.0])]
    waves[0].release()
    executed = WaveBatch(Planner(SIX), 1, waves, put).run_on(Doubling(), Workspace())
    assert isinstance(executed, ExecutedWaves)
    gone, other = answers_of(waves, executed)
    assert [error for *_, error in gone] == [(ErrorCode.UNAVAILABLE, GONE)] * 2
    assert [error for *_, error in other] == [None]


_strings = st.lists(
    st.one_of(
        st.binary(max_size=4).map(lambda one: join_bytes_elements([one])),
        st.binary(max_size=4).map(lambda one: join_bytes_elements([one])),
        st.sampled_from([b"\xff\0\0\0x", join_bytes_elements([b"a", b"b"])]),
    ),
    min_size=1,
    max_size=6,
)


@given(st.lists(_strings, min_size=1, max_size=3))
def test_waves_of_strings(made: list[list[bytes]]) -> None:
    """Only requests whose own strings are malformed fail, and each is counted once."""
    planner = Planner(STRINGS)
    waves = [strings_wave(number + 1, values) for number, values in enumerate(made)]
    executed = WaveBatch(planner, 1, waves).run_on(Echo(), Workspace())
    assert isinstance(executed, ExecutedWaves)
    records = [record for wave in waves for record in wave.requests()]
    expected = []
    for record in records:
        alone = Batch(planner, 1, [record])
        expected.append(said(unpack_response(alone.run_on(Echo(), Workspace()).answers[0])))
    assert [one for told in answers_of(waves, executed) for one in told] == expected
    failed = sum(1 for one in expected if one[-1] is not None)
    found = counted(wave_increments(waves, executed))
    assert found.get("success_count", 0) == found.get("inference_count", 0) == len(records) - failed
    assert found.get("queue_count", 0) == found.get("compute_infer_count", 0) == len(records) - failed
    assert found.get("fail_count", 0) == failed
    assert sum(executed.failed.values()) == failed


@given(st.lists(_values, min_size=1, max_size=3))
def test_requests_of_waves(made: list[list[float]]) -> None:
    planner = Planner(SIX)
    waves = [numbers_wave(number + 1, values) for number, values in enumerate(made)]
    executed = asyncio.run(WaveBatch(planner, 1, waves).run_requests_on(DoublingRequests()))
    assert isinstance(executed, ExecutedWaves)
    expected: list[tuple[object, ...]] = []
    totals: dict[str, int] = {}
    run: list[RequestRecord] = []
    for wave in [*waves, None]:
        if run and (wave is None or len(run) + wave.count > 6):
            alone = Batch(planner, 1, run)
            asyncio.run(alone.run_requests_on(DoublingRequests()))
            expected += [said(unpack_response(answer)) for answer in alone.executed.answers]
            for name, amount in counted(increments(run, alone.executed)).items():
                totals[name] = totals.get(name, 0) + amount
            run = []
        if wave is not None:
            run += wave.requests()
    assert [one for told in answers_of(waves, executed) for one in told] == expected
    assert counted(wave_increments(waves, executed)) == totals


@pytest.mark.parametrize("kind", ["arrays", "requests"])
def test_waves_that_were_not_answered_before_a_death_have_no_outcome(kind: str) -> None:
    waves = [numbers_wave(1, [1.0] * 5), numbers_wave(2, [1.0, DEADLY]), numbers_wave(3, [2.0])]
    batch = WaveBatch(Planner(SIX), 1, waves)

    def run() -> None:
        if kind == "arrays":
            batch.run_on(Doubling(), Workspace())
        else:
            asyncio.run(batch.run_requests_on(DoublingRequests()))

    with pytest.raises(InstanceDied):
        run()
    assert [len(told) for told in answers_of(waves, batch.executed)] == [5, 0, 0]
    assert counted(wave_increments(waves, batch.executed))["success_count"] == 5


def test_failures_of_a_wave_that_runs_again_do_not_count() -> None:
    """One of its requests was malformed, and under the others the instance died."""
    waves = [numbers_wave(1, [1.0, 2.0]), numbers_wave(2, [1.0])]
    batch = WaveBatch(Planner(SIX), 1, waves)
    (run,) = batch._runs()
    failures = [Failure(index, InvalidArgument("malformed"), OTHER, 5) for index in (1, 2)]
    batch._take(run, batch._requests_of(run), Executed([b"", b"failed", b"failed"], [], failures))
    assert (batch.executed.left(), batch.executed.failed) == ([0], {1: 1})
    assert wave_increments(waves, batch.executed)["fail_count"] == 1
    batch.fail_all(InternalError("it died"))
    assert wave_increments(waves, batch.executed)["fail_count"] == 3


def test_a_wave_that_fits_no_batch_any_more_fails_by_itself() -> None:
    """The model was loaded anew meanwhile."""
    waves = [numbers_wave(1, [1.0] * 7), numbers_wave(2, [1.0]), strings_wave(3, [join_bytes_elements([b"a"])])]
    executed = WaveBatch(Planner(SIX), 1, waves).run_on(Doubling(), Workspace())
    assert isinstance(executed, ExecutedWaves)
    told = answers_of(waves, executed)
    assert [[one[-1] is None for one in of_wave] for of_wave in told] == [[False] * 7, [True], [False]]
    assert wave_increments(waves, executed)["success_count"] == 1
    assert wave_increments(waves, executed)["fail_count"] == 8


class Given:
    """Gives one array, whatever it gets."""

    def __init__(self) -> None:
        self.y = np.ones((2, 1), np.float32)

    def execute(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Mapping[str, Any]:
        return {"y": self.y}

    def close(self) -> None: ...


def test_results_of_another_form_are_checked_although_an_earlier_form_is_known() -> None:
    planner, workspace, model = Planner(SIX), Workspace(), Given()

    def told() -> list[tuple[object, ...]]:
        wave = numbers_wave(2, [1.0, 2.0])
        (answers,) = answers_of([wave], WaveBatch(planner, 1, [wave]).run_on(model, workspace))  # type: ignore[arg-type]
        return answers

    first = told()
    model.y = np.array([[5.0], [6.0]], np.float32)
    (_, _, _, ((name, datatype, shape, data),), _, error), _ = told()
    assert (name, datatype, shape, data, error) == ("y", DataType.FP32, (1, 1), np.float32(5.0).tobytes(), None)
    for wrong in (np.ones((2, 1), np.float64), np.ones((3, 1), np.float32), np.ones((), np.float32)):
        model.y = wrong
        assert all(error is not None for *_, error in told())
    model.y = np.ones((2, 1), ">f4").astype("<f4")[::-1]
    assert told() == first
    model.y = np.ones((2, 3), np.float32)
    assert [outputs[0][2] for _, _, _, outputs, _, _ in told()] == [(1, 3), (1, 3)]
