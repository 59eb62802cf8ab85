"""Which requests are recorded, within which bounds, and what a recording holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import catalog_facts as facts
import numpy as np
import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import Cancelled, CharoniaError, DeadlineExceeded, InternalError, LogUnavailable, ResourceExhausted
from charonia.inference import InferenceRequest, RegionPart, RegionUse
from charonia.models.recording_rules import RecordingRules
from charonia.tensors import Tensor
from charonia.wire import ResponseRecord
from charonia.wire.recorded_calls import REPLAY_PRIORITY, RecordedCall, RecordedStep, unpack_recorded_call
from gateway.releases import request_recorder
from gateway.releases.request_recorder import IN_REGIONS, TOO_LARGE, RequestRecorder
from gateway.requests.delivery import Caller, DeliveryOptions

SERVED = facts.catalog(facts.joined(), facts.loaded(version=2), facts.scanned()).find("m", 2)
ALL = RecordingRules(1.0)
FAR_US = 2**53


@dataclass
class Admitted:
    request: InferenceRequest
    served: Any = SERVED
    options: DeliveryOptions = field(default_factory=DeliveryOptions)


def tensor(value: float, size: int = 1) -> Tensor:
    return Tensor.of("y", np.full(size, value, np.float32))


def answer(
    value: float = 1, size: int = 1, error: CharoniaError | None = None, *, final: bool = True
) -> ResponseRecord:
    outputs = [] if error is not None else [tensor(value, size), Tensor.of("z", np.array([b"word"], np.object_))]
    return ResponseRecord(b"", "m", 2, outputs, {}, error, final)


def request(size: int = 1, tenant: str = "", **more: Any) -> Admitted:
    asked = InferenceRequest("m", -1, [Tensor.of("x", np.arange(size, dtype=np.int32))], **more)
    return Admitted(asked, options=DeliveryOptions(caller=Caller(tenant)))


async def recorded(log: MemoryLog) -> list[RecordedCall]:
    """All recordings, in the order of their times."""
    call_ids = await log.due(keys.recorded_times("m"), FAR_US, 1000)
    found = await log.notes([keys.recorded_call("m", call_id) for call_id in call_ids])
    return [unpack_recorded_call(record) for record in found if record is not None]


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


async def test_a_recording_holds_what_was_asked_and_answered(log: MemoryLog) -> None:
    recorder = RequestRecorder(log)
    asked = request(
        3, id="mine", outputs=("z",), parameters={"a": 1}, sequence_id="s", sequence_start=True, sequence_end=True
    )
    started_ns = monotonic_ns() - 5_000_000_000
    recorder.answered(ALL, asked, answer(), started_ns)
    await recorder.settled()
    (found,) = await recorded(log)
    assert [(t.name, t.array().tolist()) for t in found.inputs] == [("x", [0, 1, 2])]
    assert (found.version, found.outputs, found.parameters, found.client_id) == (2, ("z",), {"a": 1}, "mine")
    assert found.sequence == RecordedStep("s", start=True, end=True)
    assert [[t.name for t in response.outputs] for response in found.responses] == [["z"]], "what the client got"
    assert 4_000_000 < wall_ns() // 1000 - found.at_us < 60_000_000, "when it was asked"
    assert recorder.counts == {("m", "recorded"): 1}
    assert recorder.pending_bytes == 0


async def test_a_request_that_is_answered_later_is_recorded_with_its_job(log: MemoryLog) -> None:
    recorder = RequestRecorder(log)
    job = bytes(range(16))
    recorder.submitted(ALL, request(3, outputs=("z",)), job, monotonic_ns())
    recorder.submitted(ALL, request(tenant="a"), bytes(16), monotonic_ns())
    recorder.submitted(ALL, request(priority=REPLAY_PRIORITY), bytes(16), monotonic_ns())
    await recorder.settled()
    (found,) = await recorded(log)
    assert (found.job, found.responses, found.unkept, found.outputs) == (job, (), "", ("z",))
    assert [(t.name, t.array().tolist()) for t in found.inputs] == [("x", [0, 1, 2])]
    assert recorder.counts == {("m", "recorded"): 1}
    assert recorder.pending_bytes == 0


@pytest.mark.parametrize(
    ("rules", "one", "count"),
    [
        (ALL, request(), 1),
        (ALL, request(tenant="a"), 0),
        (RecordingRules(1.0, tenants=frozenset({"a"})), request(tenant="a"), 1),
        (RecordingRules(1.0, tenants=frozenset({"*"})), request(tenant="b"), 1),
        (ALL, request(priority=REPLAY_PRIORITY), 0),
    ],
)
async def test_who_is_recorded(log: MemoryLog, rules: RecordingRules, one: Admitted, count: int) -> None:
    recorder = RequestRecorder(log)
    recorder.answered(rules, one, answer(), monotonic_ns())
    await recorder.settled()
    assert len(await recorded(log)) == count


async def test_a_share_is_recorded_and_of_sequences_all_or_nothing(log: MemoryLog) -> None:
    recorder = RequestRecorder(log)
    rules = RecordingRules(0.5)
    for number in range(200):
        recorder.answered(rules, request(), answer(), monotonic_ns())
        for step in range(3):
            one = request(sequence_id=number + 1, sequence_start=step == 0, sequence_end=step == 2)
            recorder.answered(rules, one, answer(), monotonic_ns())
        await recorder.settled()
    of_sequences: dict[Any, int] = {}
    found = await recorded(log)
    for call in found:
        if call.sequence is not None:
            of_sequences[call.sequence.id] = of_sequences.get(call.sequence.id, 0) + 1
    # with 200 draws fewer than 50 or more than 150 come once in 10^12 runs
    assert 50 < sum(call.sequence is None for call in found) < 150
    assert 50 < len(of_sequences) < 150
    assert set(of_sequences.values()) == {3}


@pytest.mark.parametrize("error", [InternalError("broken"), None])
async def test_errors_of_the_model_are_answers(log: MemoryLog, error: CharoniaError | None) -> None:
    recorder = RequestRecorder(log)
    recorder.answered(ALL, request(), answer(error=error), monotonic_ns())
    await recorder.settled()
    (found,) = await recorded(log)
    assert type(found.responses[0].error) is type(error)


@pytest.mark.parametrize("error", [ResourceExhausted("full"), DeadlineExceeded("late"), Cancelled("left")])
async def test_errors_that_say_nothing_about_the_model_are_not_and_leave_a_gap(
    log: MemoryLog, error: CharoniaError
) -> None:
    recorder = RequestRecorder(log)
    for step, result in enumerate((answer(0), answer(error=error), answer(2))):
        recorder.answered(ALL, request(sequence_id=7, sequence_start=step == 0), result, monotonic_ns())
    recorder.answered(ALL, request(sequence_id=7, sequence_start=True), answer(3), monotonic_ns())
    recorder.lost(request(sequence_id=7))
    recorder.answered(ALL, request(sequence_id=7), answer(4), monotonic_ns())
    await recorder.settled()
    values = [call.responses[0].outputs[0].array().tolist() for call in await recorded(log)]
    assert values == [[0.0], [3.0]]


async def test_the_oldest_go_when_there_are_too_many_bytes(log: MemoryLog) -> None:
    recorder = RequestRecorder(log)
    rules = RecordingRules(1.0, limit_bytes=10_000)
    for number in range(10):
        recorder.answered(rules, request(250), answer(number, 250), monotonic_ns())
        await recorder.settled()
    found = await recorded(log)
    assert [call.responses[0].outputs[0].array()[0] for call in found] == [7.0, 8.0, 9.0]
    assert len(await log.due(keys.recorded_times("m"), FAR_US, 100)) == 3


async def test_what_has_expired_leaves_the_index(log: MemoryLog) -> None:
    old = (wall_ns() // 1000 - 100_000_000).to_bytes(8, "big") + bytes(8)
    await log.set_times(keys.recorded_times("m"), {old: int.from_bytes(old[:8], "big")})
    await log.keep_recent(keys.recorded_sizes("m"), {old: (1, 500)}, 1 << 30)
    recorder = RequestRecorder(log)
    recorder.answered(RecordingRules(1.0, keep_s=50), request(), answer(), monotonic_ns())
    await recorder.settled()
    assert old not in await log.due(keys.recorded_times("m"), FAR_US, 100)
    assert old not in await log.keep_recent(keys.recorded_sizes("m"), {}, 0)


async def test_indexes_go_after_the_last_recording(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[bytes, int] = {}

    async def keep_until(key: bytes, until_us: int) -> None:
        said[key] = until_us

    monkeypatch.setattr(log, "keep_until", keep_until)
    recorder = RequestRecorder(log)
    before_us = wall_ns() // 1000
    recorder.answered(RecordingRules(1.0, keep_s=1000), request(), answer(), monotonic_ns())
    await recorder.settled()
    assert list(said) == [keys.recorded_times("m"), keys.recorded_sizes("m")]
    assert min(said.values()) > before_us + 1000 * 1_000_000


@pytest.mark.parametrize(("of_request", "of_answer"), [(3_000_000, 1), (1, 3_000_000)])
async def test_what_is_too_large_is_noted_without_its_tensors(log: MemoryLog, of_request: int, of_answer: int) -> None:
    recorder = RequestRecorder(log)
    recorder.answered(ALL, request(of_request), answer(1, of_answer), monotonic_ns())
    await recorder.settled()
    (found,) = await recorded(log)
    assert (found.unkept, found.inputs, found.responses) == (TOO_LARGE, [], ())
    assert recorder.counts == {("m", "unkept"): 1}
    assert recorder.pending_bytes == 0


async def test_outputs_in_shared_memory_are_not_kept(log: MemoryLog) -> None:
    recorder = RequestRecorder(log)
    part = RegionPart("r", 0, 4)
    recorder.answered(ALL, request(regions=RegionUse({}, {"y": part})), answer(), monotonic_ns())
    recorder.answered(ALL, request(regions=RegionUse({0: part}, {})), answer(), monotonic_ns())
    await recorder.settled()
    assert [call.unkept for call in await recorded(log)] == [IN_REGIONS, ""]


async def test_responses_of_a_stream_are_kept_in_order(log: MemoryLog) -> None:
    recorder = RequestRecorder(log)
    tape = recorder.tape(ALL, request(), monotonic_ns())
    assert tape is not None
    for number in range(3):
        tape.add(answer(number, final=False))
    tape.add(ResponseRecord(b"", "m", 2, [], {}, None, final=True, place=(1, 3)))
    assert tape.size_bytes == recorder.pending_bytes > 0
    recorder.ended(tape)
    left = recorder.tape(ALL, request(), monotonic_ns())
    assert left is not None
    recorder.left(left)
    await recorder.settled()
    (found,) = await recorded(log)
    assert [response.outputs[0].array().tolist() for response in found.responses] == [[0.0], [1.0], [2.0]]
    assert recorder.pending_bytes == 0


@pytest.mark.parametrize("place", [None, (1, 0)])
async def test_a_last_response_without_outputs_is_kept(log: MemoryLog, place: tuple[int, int] | None) -> None:
    recorder = RequestRecorder(log)
    tape = recorder.tape(ALL, request(), monotonic_ns())
    assert tape is not None
    tape.add(ResponseRecord(b"", "m", 2, [], {}, None, final=True, place=place, bare=place is not None))
    recorder.ended(tape)
    await recorder.settled()
    (found,) = await recorded(log)
    assert [response.outputs for response in found.responses] == [[]]


async def test_many_small_responses_are_too_large_together(log: MemoryLog) -> None:
    recorder = RequestRecorder(log)
    tape = recorder.tape(ALL, request(), monotonic_ns())
    assert tape is not None
    for _ in range(20_000):
        tape.add(ResponseRecord(b"", "m", 2, [], {}, None, final=False))
    assert (tape.unkept, tape.packed, recorder.pending_bytes) == (TOO_LARGE, [], 0)
    recorder.left(tape)


async def test_what_is_on_the_way_is_bounded(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_recorder, "MAX_PENDING_BYTES", 1500)
    recorder = RequestRecorder(log)
    for _ in range(3):
        recorder.answered(ALL, request(100), answer(), monotonic_ns())
    assert recorder.counts == {("m", "skipped"): 1}
    await recorder.settled()
    assert recorder.counts == {("m", "skipped"): 1, ("m", "recorded"): 2}
    assert recorder.pending_bytes == 0


async def test_a_log_that_is_away_costs_recordings_and_nothing_else(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*_: Any) -> None:
        raise LogUnavailable("no log")

    recorder = RequestRecorder(log)
    with monkeypatch.context() as patched:
        patched.setattr(log, "put_note", refuse)
        for _ in range(3):
            recorder.answered(ALL, request(sequence_id=1, sequence_start=True), answer(), monotonic_ns())
        await recorder.settled()
    recorder.answered(ALL, request(sequence_id=1), answer(), monotonic_ns())
    recorder.answered(ALL, request(), answer(), monotonic_ns())
    await recorder.close()
    assert recorder.counts == {("m", "failed"): 3, ("m", "skipped"): 1, ("m", "recorded"): 1}
    assert caplog.text.count("are not recorded: no log") == 1
