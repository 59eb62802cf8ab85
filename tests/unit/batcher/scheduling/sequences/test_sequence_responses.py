"""Sequences whose requests have several responses: freed instances, turns, and what may run again."""

from __future__ import annotations

from google.protobuf import text_format
from sequence_bench import Bench, batch, names

from batcher.scheduling.decisions import CondemnRequest, DispatchBatch, RejectRequest
from batcher.scheduling.observations import (
    BatchDied,
    BatchFinished,
    ExecutorLost,
    PolicyChanged,
    QueueHeld,
    RequestsRescheduled,
    ResponsesBegun,
    SlotFreed,
    VersionServed,
)
from charonia.errors import ErrorCode
from charonia.models.interface import ModelInterface
from executors.configuration.config import normalise
from protos.model_config_pb2 import ModelConfig

SEEN = "STREAM_INTERRUPTED: {}, and the model is not declared repeatable (charonia.repeatable)"


def test_a_freed_instance_takes_other_sequences() -> None:
    """Of decoupled models: a sequence whose responses are still to come has nothing else that runs."""
    bench = Bench()
    first = batch(bench.send("a", "s"))
    assert bench.send("a") == bench.send("b", "s") == []
    other = batch(bench.see(SlotFreed(first.batch_id, "e")))
    assert names(other) == ["b"]
    assert bench.send("b") == []
    assert bench.see(SlotFreed(other.batch_id, "e"), SlotFreed("nobody's", "e")) == []
    assert names(batch(bench.finish(first))) == ["a"]
    assert bench.finish(other) == [], "its instance has a's batch"


def test_nothing_of_which_a_response_was_seen_runs_again() -> None:
    """And what follows in its sequence ends with it."""
    bench = Bench()
    first = batch(bench.see(*(bench.request(name, "s") for name in "ab")))
    bench.send("a")
    bench.see(ResponsesBegun(first.batch_id, "e", frozenset({first.requests[0].id})))
    told = bench.see(ExecutorLost("e"))
    rejected = [one for one in told if isinstance(one, RejectRequest)]
    assert [one.code for one in rejected] == [ErrorCode.UNAVAILABLE, ErrorCode.CANCELLED]
    assert (rejected[0].request, rejected[0].message) == (first.requests[0], SEEN.format("its executor was lost"))
    assert names(batch(bench.see(VersionServed("f", 1, "h", 1)))) == ["b"]


def test_a_repeatable_model_runs_again() -> None:
    bench = Bench(serve=False)
    text = (
        'name: "m" backend: "python" max_batch_size: 4 sequence_batching { } '
        'parameters { key: "charonia.repeatable" value { string_value: "true" } }'
    )
    bench.see(PolicyChanged(ModelInterface.of(normalise(text_format.Parse(text, ModelConfig())))))
    bench.see(VersionServed("e", 1, "h", 1))
    first = batch(bench.send("a", "s"))
    bench.see(ResponsesBegun(first.batch_id, "e", frozenset({first.requests[0].id})))
    bench.see(ExecutorLost("e"))
    assert batch(bench.see(VersionServed("f", 1, "h", 1))).attempts == (2,)


def test_the_turns_of_a_request_end_with_its_instance() -> None:
    """S41: it begins anew, as another attempt, unless a response was seen."""
    for seen in (False, True):
        bench = Bench()
        first = batch(bench.send("a", "s"))
        request = first.requests[0]
        bench.see(QueueHeld(True))
        bench.see(RequestsRescheduled(first.batch_id, "e", frozenset({request.id})))
        if seen:
            bench.see(ResponsesBegun(first.batch_id, "e", frozenset({request.id})))
        bench.finish(first)
        told = bench.see(VersionServed("e", 1, "another", 1), QueueHeld(False))
        if seen:
            assert isinstance(told[0], RejectRequest)
            assert told[0].message == SEEN.format("its instance is gone")
        else:
            again = batch(told)
            assert again.sequences is not None
            assert (again.attempts, again.sequences.places[0].again) == ((2,), False)


def test_a_suspect_has_an_instance_for_itself() -> None:
    """One that dies in company of what freed it before blames nobody."""
    bench = Bench()
    streams = batch(bench.send("a", "s"))
    bench.see(SlotFreed(streams.batch_id, "e"))
    both = batch(bench.see(bench.request("b", "s"), bench.request("c", "s")))
    ids = frozenset(request.id for request in both.requests)
    assert bench.see(BatchDied(both.batch_id, "e", ids, "it died", in_company=True)) == []
    alone = batch(bench.finish(streams))
    assert names(alone) == ["b"]
    assert bench.see(SlotFreed(alone.batch_id, "e")) == []
    told = bench.see(BatchDied(alone.batch_id, "e", frozenset({alone.requests[0].id}), "it died"))
    assert isinstance(told[0], CondemnRequest)
    assert names(next(one for one in told if isinstance(one, DispatchBatch))) == ["c"]


def test_a_suspect_that_dies_alone_is_condemned_though_something_else_may_have_ended_it() -> None:
    bench = Bench()
    first = batch(bench.send("a", "s"))
    ids = frozenset(request.id for request in first.requests)
    told = bench.see(BatchDied(first.batch_id, "e", ids, "it died", in_company=True))
    again = batch(told)
    assert names(again) == ["a"]
    told = bench.see(BatchDied(again.batch_id, "e", ids, "it died", in_company=True))
    assert isinstance(told[0], CondemnRequest)


def test_no_sequence_is_blamed_for_another_instance_of_its_process() -> None:
    """Instances of an isolated model share a process: when the culprit ends it, all batches there die in company."""
    bench = Bench(serve=False)
    bench.see(VersionServed("e", 1, "h", 2))
    running = {names(one)[0]: one for one in map(batch, (bench.send("innocent", "s"), bench.send("culprit", "s")))}
    ended: list[object] = []
    for _ in range(10):
        if not running:
            break
        is_over = "culprit" in running
        events = [
            BatchDied(one.batch_id, "e", frozenset(request.id for request in one.requests), "it died", in_company=True)
            if is_over
            else BatchFinished(one.batch_id, "e")
            for one in running.values()
        ]
        ended += [] if is_over else running
        running = {}
        for decision in bench.see(*events):
            if isinstance(decision, DispatchBatch):
                running[names(decision)[0]] = decision
            elif isinstance(decision, CondemnRequest):
                assert decision.request.sequence is not None
                ended.append(("condemned", decision.request.sequence.correlation_id))
    assert sorted(ended, key=str) == [("condemned", "culprit"), "innocent"]
