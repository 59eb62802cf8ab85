"""What an executor remembers of sequences: whose state it has, whose it has to ask for, whose is gone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from google.protobuf import text_format

from charonia.backend import ModelResponse
from charonia.eventlog import port
from charonia.facts.sequence_states import SequenceAbout, SequenceState
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from charonia.wire import (
    BatchHeader,
    BatchPlaces,
    RequestRecord,
    SequenceMark,
    SequencePlace,
    pack_request,
    request_meta,
    unpack_request,
)
from executors.batches.sequence_batch import BatchSteps
from executors.batches.sequence_tensors import SequenceTensors
from executors.batches.sequences import Memory, Sequences
from executors.configuration.config import normalise
from executors.running.instance_pool import LoadedVersion
from executors.running.submitted_batch import SubmittedBatch
from executors.settling.settler import Settler
from protos.model_config_pb2 import ModelConfig

RUN, OTHER_RUN = b"r" * 16, b"o" * 16
KEY = b"1:" + SequenceMark(7).key
META = request_meta(1, "", [], (), {})


def sequences(memory: Memory = "states", every: int = 1, iterative: bool = False) -> Sequences:
    text = (
        'name: "m" backend: "python" max_batch_size: 4 '
        f'parameters {{ key: "charonia.checkpoint_every" value {{ string_value: "{every}" }} }} '
        f"sequence_batching {{ iterative_sequence: {str(iterative).lower()} "
        'state { input_name: "h" output_name: "hn" data_type: TYPE_FP32 dims: [ 1 ] } }'
    )
    interface = ModelInterface.of(normalise(text_format.Parse(text, ModelConfig())))
    return Sequences(interface, 1, SequenceTensors(interface, Path("/none")), memory)


def record(number: int, *, start: bool = False, end: bool = False) -> RequestRecord:
    mark = SequenceMark(7, start, end)
    packed = pack_request(
        bytes(15) + bytes([number]), b"", b"", META, (), rows=1, signature=0, level=0, accepted_ns=1, sequence=mark
    )
    return unpack_request(packed)


def header(*, run: bytes = RUN, binding: int = 1, instance: int = 0, again: bool = False) -> BatchHeader:
    places = BatchPlaces(instance, 0, (SequencePlace(0, run, binding, again),))
    return BatchHeader("b", "m", 1, "hash", 1, (1,), b"f", sequences=places)


def begin(known: Sequences, head: BatchHeader, one: RequestRecord, generation: int = 1) -> BatchSteps:
    assert head.sequences is not None
    return known.begin(head.sequences, [one], generation)


def run(
    known: Sequences, head: BatchHeader, one: RequestRecord, after: float, generation: int = 1, **how: set[int]
) -> tuple[float, tuple[dict, dict]]:
    """The state a request saw, and what its end leaves to be written; it leaves the state `after`."""
    steps = begin(known, head, one, generation)
    assert not steps.errors
    steps.steps[0].state_after = {"h": np.array([after], np.float32)}
    how = {"ended": {0}, "failed": set(), "again": set()} | how
    left = known.commit(head, [one], steps, how["ended"], how["failed"], how["again"], "e-1", generation)
    return float(steps.steps[0].state_before["h"][0]), left


def test_a_state_is_kept_written_and_ended() -> None:
    known = sequences()
    first = record(1, start=True)
    assert known.to_restore(header(), [first]) == []
    seen, (written, before) = run(known, header(), first, 5)
    assert (seen, before) == (0, {0: None})
    step = written[first.id]
    about, state = SequenceAbout.unpack(KEY, step.about), SequenceState.unpack(bytes(step.state or b""))
    assert (step.key, about.run, about.executor, about.binding, about.step) == (KEY, RUN, "e-1", 1, 1)
    assert (state.run, state.step, state.tensors[0].array().tolist()) == (RUN, 1, [5])
    assert known.to_restore(header(), [record(2)]) == []
    assert run(known, header(), record(2), 6)[0] == 5
    last = record(3, end=True)
    seen, (written, _) = run(known, header(), last, 7)
    assert (seen, written[last.id].about) == (6, b"")
    assert begin(known, header(), record(4)).errors[0].message.startswith("sequence 7 of model 'm' has lost its state")


def test_what_is_not_here_is_read_from_the_log() -> None:
    known = sequences()
    _, (written, _) = run(known, header(), record(1, start=True), 5)
    step = written[record(1).id]
    other = sequences()
    assert other.to_restore(header(binding=2), [record(2)]) == [KEY]
    other.restore([KEY], [(step.about, bytes(step.state or b""))])
    assert run(other, header(binding=2), record(2), 6)[0] == 5
    assert known.to_restore(header(binding=3), [record(3)]) == [KEY], "it has been elsewhere meanwhile"
    known.restore([KEY], [None])
    assert begin(known, header(binding=3), record(3)).errors


def test_a_state_that_is_not_of_the_last_step_is_none() -> None:
    known = sequences(every=2)
    run(known, header(), record(1, start=True), 5)
    _, (second, _) = run(known, header(), record(2), 6)
    _, (third, _) = run(known, header(), record(3), 7)
    step, last = second[record(2).id], third[record(3).id]
    assert step.state is not None
    assert last.state is None
    other = sequences(every=2)
    other.restore([KEY], [(last.about, bytes(step.state))])
    assert begin(other, header(binding=2), record(4)).errors
    other.restore([KEY], [(step.about, bytes(step.state))])
    assert not begin(other, header(binding=2), record(4)).errors
    other.restore([KEY], [(step.about, bytes(step.state))])
    assert begin(other, header(binding=2, run=OTHER_RUN), record(4)).errors, "of a run that is over"
    spoilt = SequenceState(RUN, 2, (Tensor.of("h", np.zeros(2, np.float32)),)).pack()
    other.restore([KEY, KEY], [(step.about, spoilt), (b"x", b"y")])
    assert begin(other, header(binding=2), record(4)).errors, "of another shape than the model has now"


def test_what_the_log_does_not_have_is_known_until_it_is_written() -> None:
    known = sequences(every=5)
    _, (written, _) = run(known, header(), record(1, start=True), 5)
    about = written[record(1).id].about
    assert known.unwritten() == [KEY]
    assert known.newest(KEY) is not None
    told, packed = known.newest(KEY) or (b"", b"")
    state = SequenceState.unpack(packed)
    assert (told, state.run, state.step, state.tensors[0].array().tolist()) == (about, RUN, 1, [5])
    _, (written, _) = run(known, header(), record(2), 6)
    known.mark_written(KEY, about)
    assert known.unwritten() == [KEY], "there is a newer one meanwhile"
    known.mark_written(KEY, written[record(2).id].about)
    assert known.unwritten() == []
    assert known.newest(KEY) is None
    # what failed has changed nothing that would have to be written
    _, (written, _) = run(known, header(), record(3), 99, failed={0})
    assert (written[record(3).id].state, known.unwritten()) == (None, [])
    known.leaving = 1
    _, (written, _) = run(known, header(), record(4), 7)
    assert SequenceState.unpack(bytes(written[record(4).id].state or b"")).step == 3
    assert known.unwritten() == []
    for one in (sequences(every=0), sequences("instances", every=5), sequences("nothing", every=5)):
        one.leaving = 1
        _, (written, _) = run(one, header(), record(1, start=True), 5)
        assert (written[record(1).id].state, one.unwritten(), one.checkpoints) == (None, [], False)


def test_a_state_that_the_log_would_not_take_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "MAX_RECORD_BYTES", 10)
    for every in (1, 5):
        known = sequences(every=every)
        _, (written, _) = run(known, header(), record(1, start=True), 5)
        assert (written[record(1).id].state, known.newest(KEY), known.unwritten()) == (None, None, [])
        assert run(known, header(), record(2), 6)[0] == 5, "it is known here"
        other = sequences(every=every)
        other.restore([KEY], [(written[record(1).id].about, b"")])
        assert begin(other, header(binding=2), record(3)).errors


def test_what_has_another_place_at_the_same_executor_is_known_although_the_log_has_an_older_state() -> None:
    known = sequences(every=5)
    _, (written, _) = run(known, header(), record(1, start=True), 5)
    assert known.to_restore(header(binding=2, instance=1), [record(2)]) == [KEY]
    known.restore([KEY], [(written[record(1).id].about, b"")])
    assert run(known, header(binding=2, instance=1), record(2), 6)[0] == 5
    # but not when another executor has gone on with it
    elsewhere = replace(SequenceAbout.unpack(KEY, written[record(1).id].about), step=3)
    known.restore([KEY], [(elsewhere.pack(), b"")])
    assert begin(known, header(binding=3), record(4)).errors


def test_a_failure_changes_no_state_and_a_lost_settlement_goes_back() -> None:
    known = sequences()
    run(known, header(), record(1, start=True), 5)
    _, (written, _) = run(known, header(), record(2), 99, failed={0})
    assert written[record(2).id].state is None
    assert SequenceAbout.unpack(KEY, written[record(2).id].about).step == 1
    seen, (_, before) = run(known, header(), record(3), 77)
    assert seen == 5
    known.roll_back([record(3)], before)
    assert run(known, header(), record(4), 6)[0] == 5
    known.forget([record(4)], {0})
    assert known.to_restore(header(), [record(5)]) == [KEY]


@pytest.mark.parametrize(("every", "told", "asks"), [(1, False, True), (1, True, False), (2, False, False)])
def test_what_somebody_else_may_have_run_is_asked_of_the_log(every: int, told: bool, asks: bool) -> None:
    """Two owners in a row may give a step out: what came second here is not what the log has."""
    known = sequences(every=every)
    run(known, header(), record(1, start=True), 5)
    step = record(2)
    _, (_, before) = run(known, header(), step, 6)
    job = SubmittedBatch(
        [step], lambda *_: None, header(), before=before, unwanted=frozenset({step.id} if told else ())
    )
    incarnation = SimpleNamespace(pool=SimpleNamespace(sequences=known))
    Settler._settle_sequences(job, {0: False}, cast(LoadedVersion, incarnation))
    assert known.to_restore(header(), [record(3)]) == ([KEY] if asks else [])


def test_turns_are_seen_by_the_same_request_alone() -> None:
    known = sequences(iterative=True)
    one = record(1, start=True, end=True)
    steps = begin(known, header(), one)
    assert (steps.steps[0].start, steps.steps[0].end) == (True, False)
    seen, (written, before) = run(known, header(), one, 1, ended=set(), again={0})
    assert (seen, written, before) == (0, {}, {})
    assert not begin(known, header(again=True), one).steps[0].start
    assert run(known, header(again=True), one, 2, ended=set(), again={0})[0] == 1
    assert run(known, header(), one, 1, ended=set(), again={0})[0] == 0, "it began anew"
    seen, (written, _) = run(known, header(again=True), one, 2)
    assert (seen, written[one.id].about) == (1, b"")


def test_a_model_that_remembers_itself_goes_on_only_where_it_was() -> None:
    known = sequences("instances")
    run(known, header(), record(1, start=True), 0)
    assert known.to_restore(header(binding=2), [record(2)]) == [], "the log could not help"
    assert not begin(known, header(), record(2)).errors
    assert begin(known, header(), record(2), generation=2).errors
    assert begin(known, header(instance=1), record(2)).errors
    assert begin(known, header(binding=2), record(2)).errors
    assert not begin(sequences("nothing"), header(), record(2)).errors


def test_what_nobody_uses_is_forgotten() -> None:
    known = sequences()
    run(known, header(), record(1, start=True), 5)
    known._max_idle_us = -1
    known._since_sweep = 1 << 20
    run(known, header(run=OTHER_RUN), record(9, start=True), 5)
    assert len(known._known) == 1
    assert known._known[KEY].run == OTHER_RUN


def direct(ready: bool = True) -> Sequences:
    control = 'control_input { name: "R" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }'
    text = (
        'name: "m" backend: "python" max_batch_size: 4 sequence_batching { direct { } '
        'state { input_name: "h" output_name: "hn" data_type: TYPE_FP32 dims: [ 1 ] } '
    )
    interface = ModelInterface.of(normalise(text_format.Parse(text + (control if ready else "") + "}", ModelConfig())))
    return Sequences(interface, 1, SequenceTensors(interface, Path("/none")), "states")


def test_a_start_in_the_slot_of_a_sequence_that_did_not_end_vacates_it() -> None:
    """S33."""
    for known, clears_slots in ((direct(), True), (direct(ready=False), False), (sequences(), True)):
        run(known, header(), record(1, start=True), 5)
        assert not begin(known, header(), record(2)).clears_slots
        assert not begin(known, header(), record(1, start=True)).clears_slots, "the same one, given out again"
        assert not begin(known, header(run=OTHER_RUN, binding=2), record(3, start=True)).clears_slots, "in another slot"
        assert not begin(known, header(run=OTHER_RUN), record(3, start=True), generation=2).clears_slots, (
            "another process"
        )
        expected = clears_slots and known.tensors.has_ready_control
        assert begin(known, header(run=OTHER_RUN), record(3, start=True)).clears_slots is expected
        run(known, header(), record(4, end=True), 6)
        assert not begin(known, header(run=OTHER_RUN), record(5, start=True)).clears_slots, "it had ended"


def test_turns_of_a_request_count_their_responses_on() -> None:
    """S41 of decoupled models."""
    known = sequences(iterative=True)
    first = record(1, start=True)
    steps = begin(known, header(), first)
    assert steps.steps[0].responses_sent == 0
    steps.keep_partial(0)
    steps.steps[0].responses_sent = 3
    assert known.commit(header(), [first], steps, set(), set(), {0}, "e-1", 1) == ({}, {})
    later = begin(known, header(again=True), first).steps[0]
    assert (later.responses_sent, later.start, float(later.state_before["h"][0])) == (3, False, 0)
    assert begin(known, header(), first).steps[0].responses_sent == 0, "restarted"


def test_the_last_states_of_several_responses_count() -> None:
    steps = begin(sequences(), header(), record(1, start=True))
    state = Tensor.of("hn", np.array([[5]], np.float32))
    other = Tensor.of("y", np.array([[1]], np.float32))
    assert steps.keep_from_response(0, ModelResponse([other]))
    assert steps.steps[0].state_after is None
    assert steps.keep_from_response(0, ModelResponse([other, Tensor.of("hn", np.array([[4]], np.float32))]))
    assert not steps.keep_from_response(0, ModelResponse([state])), "nothing for its caller"
    assert steps.keep_from_response(0, ModelResponse([state], {"a": 1}))
    assert steps.steps[0].state_after is not None
    assert float(steps.steps[0].state_after["h"][0]) == 5
