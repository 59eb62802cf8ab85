"""Whatever an instance, a cancel or a failure does: each request of a streamed batch ends once, its places in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.backend import ModelRequest, ModelResponse
from charonia.errors import CharoniaError, InternalError, InvalidArgument
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from charonia.wire import RequestRecord, pack_request, request_meta, unpack_request, unpack_response
from executors.batches.assembly import Planner, groups
from executors.batches.execution import Batch
from executors.configuration.config import normalise
from executors.running.streamed_batch import FlowControl, Outgoing, StreamedBatch
from executors.settling.settlement import increments

CONFIG = """
name: "m" backend: "python" max_batch_size: 8 model_transaction_policy { decoupled: %s }
input { name: "x" data_type: TYPE_INT32 dims: 1 } output { name: "y" data_type: TYPE_INT32 dims: 1 }
"""
WRONG = ModelResponse([Tensor.of("y", np.zeros((1, 1), np.float64))])
GOOD = ModelResponse([Tensor.of("y", np.ones((1, 1), np.int32))])


class Kept:
    """What a writer is given."""

    def __init__(self) -> None:
        self.all: list[Outgoing] = []

    def put(self, outgoing: Outgoing) -> None:
        outgoing.batch.flow.written(outgoing.record)
        self.all.append(outgoing)

    def freed(self, batch: StreamedBatch) -> None: ...


def record(number: int) -> RequestRecord:
    tensors = [Tensor.of("x", np.array([[number]], np.int32))]
    # the last one does not fit and is refused before it runs
    given = tensors if number < 4 else [Tensor.of("x", np.array([[number]], np.float64))]
    packed = pack_request(
        number.to_bytes(16, "big"),
        b"gw",
        b"",
        request_meta(1, "", given, (), {}),
        [t.data for t in given],
        rows=1,
        signature=0,
        level=0,
        accepted_ns=1,
    )
    return unpack_request(packed)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send", "final", "final alone", "wrong", "error", "cancel", "fail", "cut"]),
        st.integers(0, 3),
    ),
    max_size=40,
)


def once(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


@settings(max_examples=examples(150))
@given(STEPS, st.booleans(), st.sets(st.integers(0, 3), max_size=1))
def test_every_request_ends_once_and_its_places_count_up(
    steps: list[tuple[str, int]], decoupled: bool, unwanted: set[int]
) -> None:
    async def scenario() -> None:
        interface = ModelInterface.of(normalise(parse(CONFIG % ("true" if decoupled else "false"))))
        records = [record(number) for number in range(5)]
        gone = {records[number].id for number in unwanted}
        batch = Batch(Planner(interface), 1, records, gone)
        writer = Kept()
        streamed = StreamedBatch(batch, [3] * 5, gone, FlowControl(), writer)
        streamed.begin()
        (planned,) = groups(interface, batch.planned)
        run = streamed.run_of(planned)
        indices = [index for index, _ in planned]
        run.begin(indices, [ModelRequest("", 0, [], (), {}) for _ in indices])
        ended: set[int] = set()
        for step, number in steps:
            if number not in indices:
                continue
            take(streamed, run, step, number, indices.index(number), ended, records)
        streamed.fail_open(InternalError("the end"))

        assert streamed.all_ended
        assert streamed.over.is_set()
        check(streamed, writer, records, decoupled=decoupled)

    once(scenario)


def take(
    streamed: StreamedBatch,
    run: object,
    step: str,
    number: int,
    at: int,
    ended: set[int],
    records: list[RequestRecord],
) -> None:
    assert hasattr(run, "send")
    try:
        match step:
            case "send":
                run.send(at, GOOD, final=False)
            case "wrong":
                run.send(at, WRONG, final=False)
            case "error":
                run.send(at, ModelResponse(error=InvalidArgument("no")), final=False)
            case "final":
                run.send(at, GOOD, final=True)
            case "final alone":
                run.send(at, None, final=True)
            case "cancel":
                streamed.cancel({records[number].id}, None)
            case "fail":
                streamed.fail_open(InternalError("failed"), {number})
            case "cut":
                streamed.fail_open(InternalError("failed"))
    except CharoniaError:
        assert not streamed.is_open(number), "only what has ended is refused"


def check(streamed: StreamedBatch, writer: Kept, records: list[RequestRecord], *, decoupled: bool) -> None:
    finals = [one.index for one in writer.all if one.final]
    assert sorted(finals) == list(range(5)), "each ends once"
    for index in range(5):
        mine = [one for one in writer.all if one.index == index]
        assert mine[-1].final
        assert not any(one.final for one in mine[:-1])
        assert [one.begins for one in mine[:-1]] == [True] + [False] * (len(mine) - 2) if len(mine) > 1 else True
        if not decoupled:
            assert len(mine) == 1
        responses = [unpack_response(one.record) for one in mine if one.record]
        assert all(response.id == records[index].id for response in responses)
        assert [response.final for response in responses[:-1]] == [False] * (len(responses) - 1)
        if index == 4 or not decoupled:
            assert all(response.place is None for response in responses)
        else:
            assert [response.place for response in responses] == [(3, place) for place in range(len(responses))]
    wanted = {one.index: one.record for one in writer.all if one.final and streamed.wanted(one.index)}
    part = streamed.part(wanted)
    counted = increments(records, part)
    done = counted.get("success_count", 0) + counted.get("fail_count", 0)
    assert done == len(wanted), "each that is wanted counts once"
    assert counted.get("execution_count", 0) == (1 if counted.get("success_count") else 0)


def test_tokens_and_earlier_responses_are_counted_for_their_own_request() -> None:
    async def scenario() -> None:
        interface = ModelInterface.of(normalise(parse(CONFIG % "true")))
        batch = Batch(Planner(interface), 1, [record(0), record(1)], set())
        streamed = StreamedBatch(batch, [1, 1], set(), FlowControl(), Kept())
        (planned,) = groups(interface, batch.planned)
        run = streamed.run_of(planned)
        run.begin([0, 1], [ModelRequest("", 0, [], (), {}) for _ in range(2)])
        output = Tensor.of("y", np.ones((1, 1), np.int32))
        for at, tokens, final in ((0, 30, False), (1, 7, False), (0, 2, False), (0, 1, True)):
            run.send(at, ModelResponse([output], tokens=tokens), final=final)
        ended = {0: b"last"}
        part = streamed.part(ended)
        assert (part.tokens, part.sent_bytes) == ({0: 33}, {0: 8})
        assert [one.indices for one in part.executions] == [(0,)]
        run.send(1, None, final=True)
        part = streamed.part({1: b"last"})
        assert (part.tokens, part.sent_bytes) == ({1: 7}, {1: 4})

    once(scenario)
