"""What is read of the log, and that a replay without anything to ask is no success."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.errors import Unavailable
from charonia.facts.jobs import JobState
from charonia.replay import replay_command
from charonia.replay.difference_report import NOT_RUN
from charonia.replay.replay_command import answers_of_job, recordings
from charonia.replay.replay_options import Target
from charonia.tensors import Tensor
from charonia.wire import ResponseRecord, pack_response
from charonia.wire.recorded_calls import RecordedCall, RecordedStep, pack_recorded_call


async def put(log: MemoryLog, at_us: int, record: bytes | None) -> bytes:
    call_id = at_us.to_bytes(8, "big") + bytes(8)
    await log.set_times(keys.recorded_times("m"), {call_id: at_us})
    if record is not None:
        await log.put_note(keys.recorded_call("m", call_id), record, 100)
    return call_id


async def test_recordings_are_read_without_their_tensors() -> None:
    log = MemoryLog()
    inputs = [Tensor.of("x", np.arange(100))]
    call = RecordedCall(5, 2, inputs, (), (), {}, "acme", "mine", RecordedStep("s", start=True, end=False))
    whole = b"".join(bytes(piece) for piece in pack_recorded_call(call, []))
    first = await put(log, 5, whole)
    await put(log, 6, b"\x09")
    gone = await put(log, 7, None)
    await put(log, 1, whole)
    await put(log, 9, whole)
    await log.set_times(keys.recorded_times("m"), {b"of another kind": 6})
    found, expired = await recordings(log, "m", since_us=2, until_us=8)
    assert [one.id for one in expired] == [gone]
    one, broken = found
    assert (one.id, one.version, one.tenant, one.client_id, one.sequence) == (first, 2, "acme", "mine", call.sequence)
    assert broken.unkept.startswith("its recording cannot be read: ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name the version to ask with --to MODEL:VERSION"),
        (["--to=m"], "--to 'm' is not MODEL:VERSION"),
        (["--to=m:1", "--absolute=x"], "'x' of --absolute is neither"),
        (["--to=m:1"], "no running 'charonia serve' has the state directory"),
        (["--to=m:1", "--log-url=nowhere"], ""),
        (["--model=m", "--drop", "--limit=5"], "--limit bounds what is asked"),
    ],
)
def test_what_cannot_be_run_has_exit_code_2(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay_command.run(["replay", "--from=journal", *words], {}, lambda: str(tmp_path)) == NOT_RUN
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
async def test_what_is_dropped_leaves_the_indexes(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    log = MemoryLog()
    whole = b"".join(bytes(piece) for piece in pack_recorded_call(RecordedCall(5, 2, [], ()), []))
    dropped, kept = await put(log, 5, whole), await put(log, 6, whole)
    await put(log, 7, None)
    found, expired = await recordings(log, "m")
    assert await replay_command._dropped(log, "m", found[:1], expired, as_json=as_json) == 0
    assert await log.due(keys.recorded_times("m"), 9, 9) == [kept]
    assert await log.notes([keys.recorded_call("m", one) for one in (dropped, kept)]) == [None, whole]
    said = capsys.readouterr().out
    assert said == ('{"model": "m", "deleted": 1}\n' if as_json else "1 recordings of model 'm' deleted\n")


async def test_a_candidate_has_to_be_ready() -> None:
    class Unready:
        url = "http://here"

        async def ready(self, model: str, version: str) -> bool:
            assert (model, version) == ("m", "3")
            return False

    with pytest.raises(Unavailable, match="version 3 of model 'm' is not ready at http://here"):
        await replay_command._candidate(Unready(), Target("m", 3), 1.0)


@pytest.mark.parametrize("is_flag", [True, False])
async def test_the_last_response_of_a_job_may_be_without_outputs(is_flag: bool) -> None:
    last = pack_response(bytes(16), "m", 1, [], {}, place=(1, 0), is_flag=is_flag)

    class Jobs:
        async def job(self, model: str, job_id: bytes) -> Any:
            return SimpleNamespace(state=JobState.SUCCEEDED)

        async def job_result(self, model: str, job_id: bytes) -> bytes:
            return last

        async def job_responses(self, *_: Any) -> Any:
            return []

    found = await answers_of_job(cast(Any, Jobs()), "m", bytes(16))
    assert [one.bare for one in found if isinstance(one, ResponseRecord)] == [True] * (not is_flag)


@pytest.mark.parametrize(
    ("kept", "last", "complete"),
    [((0, 1), 2, True), ((1, 2), 3, False), ((), 2, False), ((0, 2), 3, False), ((), 0, True)],
)
async def test_answers_of_a_job_are_all_of_them_or_none(kept: tuple[int, ...], last: int, complete: bool) -> None:
    def response(index: int, *, final: bool) -> bytes:
        return pack_response(bytes(16), "m", 1, [Tensor.of("y", np.zeros(1))], {}, final=final, place=(1, index))

    class Jobs:
        async def job(self, model: str, job_id: bytes) -> Any:
            return SimpleNamespace(state=JobState.SUCCEEDED)

        async def job_result(self, model: str, job_id: bytes) -> bytes:
            return response(last, final=True)

        async def job_responses(self, model: str, job_id: bytes, after_index: int, count: int) -> Any:
            return [(1, index, response(index, final=False)) for index in kept if index > after_index][:count]

    found = await answers_of_job(cast(Any, Jobs()), "m", bytes(16))
    if complete:
        assert [one.place for one in found if isinstance(one, ResponseRecord)] == [(1, at) for at in (*kept, last)]
    else:
        assert found == "a response of its job is not kept any more"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_cancels_the_work_and_the_next_one_ends_the_command(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    work = asyncio.get_running_loop().create_future()
    with replay_command._cancelled_by_signals(work):
        signal.raise_signal(number)
        await asyncio.wait_for(asyncio.wait([work]), 30)
        assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    assert work.cancelled()
    signal.signal(number, before)
