"""The owner of an ensemble over a log in memory: successions, a log that fails, steps that are lost. No model runs: the
test answers what is asked of the models, so it sees what is asked for twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from memory_log.log import MemoryLog

from batcher.ensembles import owned_ensemble as shell
from batcher.ensembles.step_flights import step_id
from batcher.housekeeping import periodic_checks
from batcher.housekeeping.model_checks import ModelChecks
from batcher.service import BatcherService
from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import LogUnavailable, Unavailable
from charonia.eventlog.control import ControlPlane
from charonia.eventlog.port import Entry, Limits, Reply
from charonia.eventlog.refusal_texts import string_too_large
from charonia.facts.events import (
    FIELD_FACT,
    Fact,
    ProcessJoined,
    ProcessLeft,
    RequestCancelled,
    VersionLoaded,
    pack_fact,
)
from charonia.models.names import model_key
from charonia.options.settings import BatcherSettings
from charonia.tensors import Tensor
from charonia.wire import (
    BLOB,
    Reference,
    RequestRecord,
    pack_failure,
    pack_request,
    pack_response,
    record_fields,
    records_of,
    request_meta,
    unpack_request,
    unpack_response,
)
from protos.model_config_pb2 import ModelConfig

pytestmark = pytest.mark.integration

PATIENCE_S = 20.0
CALLER = "gateway-1"
REQUEST = bytes(range(16))
NESTED = model_key("/models/one", "nested")
IO = 'input { name: "i" data_type: TYPE_FP32 dims: 1 } output { name: "o" data_type: TYPE_FP32 dims: 1 }'


def step(model: str, takes: str, gives: str) -> str:
    return (
        f'step {{ model_name: "{model}" model_version: -1 input_map {{ key: "i" value: "{takes}" }} '
        f'output_map {{ key: "o" value: "{gives}" }} }}'
    )


STEPS = step("a", "i", "x") + step("b", "x", "y") + step("c", "y", "o")
CONFIGS = {
    name: text_format.Parse(f'name: "{name}" backend: "python" {IO}', ModelConfig()) for name in ("a", "b", "c")
} | {
    "e": text_format.Parse(
        f'name: "e" platform: "ensemble" {IO} ensemble_scheduling {{ {STEPS} }}',
        ModelConfig(),
    ),
    "pair": text_format.Parse(
        f'name: "pair" platform: "ensemble" {IO} output {{ name: "p" data_type: TYPE_FP32 dims: 1 }} '
        f"ensemble_scheduling {{ {step('a', 'i', 'o')} {step('a', 'i', 'p')} }}",
        ModelConfig(),
    ),
    "levelled": text_format.Parse(
        f'name: "levelled" backend: "python" max_batch_size: 1 {IO} dynamic_batching {{ priority_levels: {2**33} '
        f"default_priority_level: {2**32} }}",
        ModelConfig(),
    ),
    "inner": text_format.Parse(
        f'name: "inner" platform: "ensemble" max_batch_size: 1 {IO} ensemble_scheduling {{ '
        f"{step('levelled', 'i', 'o')} }}",
        ModelConfig(),
    ),
    "outer": text_format.Parse(
        f'name: "outer" platform: "ensemble" max_batch_size: 1 {IO} ensemble_scheduling {{ '
        f"{step('inner', 'i', 'o')} }}",
        ModelConfig(),
    ),
    "stream": text_format.Parse(
        f'name: "stream" backend: "python" {IO} model_transaction_policy {{ decoupled: true }}', ModelConfig()
    ),
    "flow": text_format.Parse(
        f'name: "flow" platform: "ensemble" {IO} model_transaction_policy {{ decoupled: true }} ensemble_scheduling {{ '
        f"max_inflight_requests: 1 {step('stream', 'i', 'o')} }}",
        ModelConfig(),
    ),
    "outer flow": text_format.Parse(
        f'name: "outer flow" platform: "ensemble" {IO} model_transaction_policy {{ decoupled: true }} '
        f"ensemble_scheduling {{ {step('flow', 'i', 'o')} }}",
        ModelConfig(),
    ),
    NESTED: text_format.Parse(
        f'name: "nested" platform: "ensemble" {IO} ensemble_scheduling {{ {step("a", "i", "o")} }}', ModelConfig()
    ),
    "around": text_format.Parse(
        f'name: "around" platform: "ensemble" {IO} ensemble_scheduling {{ {step(NESTED, "i", "o")} }}', ModelConfig()
    ),
}


class FailingLog(MemoryLog):
    """Refuses the next steps of a model: before they are written, after that with an unknown outcome, or as too large.

    Who reads the stream `slow` waits until `go`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failing: dict[str, list[str]] = {}
        self.slow = b""
        self.waits, self.go = asyncio.Event(), asyncio.Event()

    async def range(self, stream: bytes, *arguments: Any, **more: Any) -> list[Entry]:
        if stream == self.slow:
            self.waits.set()
            await self.go.wait()
        return await super().range(stream, *arguments, **more)

    async def accept(self, model: str, *arguments: Any, **more: Any) -> None:
        when = self.failing[model].pop() if self.failing.get(model) else ""
        if when == "too large":
            raise string_too_large(1 << 30)
        if when != "before":
            await super().accept(model, *arguments, **more)
        if when:
            raise LogUnavailable("no answer")


class World:
    """A log, one owner at a time, and models that the test plays."""

    def __init__(self) -> None:
        self.log = FailingLog()
        self.asked: list[str] = []
        self._seen: dict[str, bytes] = {}
        self._owners = 0
        self._running: list[Any] = []

    async def tell(self, fact: Fact) -> None:
        await self.log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])

    async def start(self) -> None:
        await self.log.beat("gateway", CALLER, 3_600_000)
        await self.tell(ProcessJoined("executor", "executor-1"))
        for name, config in CONFIGS.items():
            # without slots nothing is given out: what is asked stays to be seen in its queue
            await self.tell(VersionLoaded("executor-1", name, 1, "hash", 0, config.SerializeToString()))
        await self.new_owner()

    async def new_owner(self) -> BatcherService:
        await self.stop_owner()
        self._owners += 1
        incarnation = f"batcher-{self._owners}"
        control = ControlPlane(self.log, check_interval_ms=3_600_000, incarnation=incarnation)
        await control.start()
        service = self.starting = BatcherService(self.log, control, BatcherSettings(incarnation))
        await service.start()
        await self.tell(ProcessJoined("batcher", incarnation))
        self._running = [service, control]
        await self.until(lambda: "e" in service.owned)
        return service

    async def stop_owner(self) -> None:
        for part in self._running:
            await part.close()
        if self._running:
            await self.tell(ProcessLeft("batcher", f"batcher-{self._owners}", "drained"))
        self._running = []

    @property
    def owned(self) -> shell.OwnedEnsemble:
        found = self._running[0].owned["e"]
        assert isinstance(found, shell.OwnedEnsemble)
        return found

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def ask(self, model: str = "e", priority: int = 0, blob: str = "") -> None:
        """`blob` is where the request's tensor lies, "" for the record itself."""
        shape = (1, 1) if model in ("levelled", "inner", "outer") else (1,)
        tensor = Tensor.of("i", np.ones(shape, np.float32))
        meta = request_meta(1, "hash", [tensor], (), {})
        record = pack_request(
            *(REQUEST, CALLER.encode(), b"mine", meta, [tensor.data]),
            rows=1,
            signature=0,
            level=priority,
            accepted_ns=wall_ns(),
            reference=Reference(BLOB, blob, tensor.size_bytes) if blob else None,
        )
        if blob:
            await self.log.put_blob(blob, tensor.data, 3600)
        await self.log.accept(model, 0, 0, [(REQUEST, len(record))], record_fields([record]), Limits())

    async def step_of(self, model: str, level: int = 0) -> RequestRecord:
        """The next request that is asked of a model."""
        async with asyncio.timeout(PATIENCE_S):
            while not (entries := await self.log.range(keys.queue(model, level), self._seen.get(model, b"0-0"), 1)):
                await asyncio.sleep(0.001)
        self._seen[model] = entries[0].id
        self.asked.append(model)
        return unpack_request(records_of(entries[0].fields)[0])

    async def answer(self, model: str, record: RequestRecord, *, error: bool = False) -> None:
        """Answer with one more than was asked, or with an error."""
        value = record.inputs()[0].array() + 1
        answer = (
            pack_failure(record.id, model, 1, Unavailable("too much"))
            if error
            else pack_response(record.id, model, 1, [Tensor.of("o", value)], {})
        )
        reply = Reply(keys.replies(record.endpoint), record_fields([answer]))
        assert await self.log.settle(model, [(record.id, 1)], None, [reply]) == [True]

    async def outcome(self) -> Any:
        """What the caller reads."""
        async with asyncio.timeout(PATIENCE_S):
            while not (entries := await self.log.range(keys.replies(CALLER))):
                await asyncio.sleep(0.001)
        (record,) = records_of(entries[0].fields)
        response = unpack_response(record)
        return response.error or response.outputs[0].array().tolist()

    async def until_tidy(self) -> None:
        """Nothing of the request is left in the log."""
        streams = (keys.queue("e", 0), keys.replies(keys.ensemble_endpoint("e")))
        async with asyncio.timeout(PATIENCE_S):
            while [entry for stream in streams for entry in await self.log.range(stream)]:
                await asyncio.sleep(0.001)
        assert await self.log.pending("e") == (0, 0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.start()
    yield made
    await made.stop_owner()


async def play(world: World, models: str) -> None:
    for model in models:
        record = await world.step_of(model)
        assert record.client_id == "mine"
        await world.answer(model, record)


@pytest.mark.parametrize("done", ["", "a", "ab", "abc"])
@pytest.mark.parametrize("is_asked", [False, True], ids=["between steps", "while a step is under way"])
async def test_a_successor_goes_on_where_the_last_owner_was(world: World, done: str, is_asked: bool) -> None:
    await world.ask()
    await play(world, done[:-1] if done else "")
    last = await world.step_of(done[-1]) if done else None
    if last is not None and not is_asked:
        await world.stop_owner()  # the answer comes while nobody reads
    if last is not None and not is_asked:
        await world.answer(done[-1], last)
    await world.new_owner()
    if last is not None and is_asked:
        await world.answer(done[-1], last)
    await play(world, "abc"[len(done) :])
    assert await world.outcome() == [4.0]
    assert world.asked == ["a", "b", "c"]
    await world.until_tidy()


@pytest.mark.parametrize("priority", [0, 1, 65, 2**32, 2**32 + 1, 2**64 - 1])
async def test_steps_inherit_the_priority_as_it_is(world: World, priority: int) -> None:
    """Through an ensemble in an ensemble as well; the model has the last word about its levels (S8)."""
    await world.until(lambda: {"inner", "outer"} <= world._running[0].owned.keys())
    await world.ask("outer", priority)
    level = priority if 0 < priority <= 2**33 else 2**32
    assert (await world.step_of("levelled", level)).level == level


async def test_an_ensemble_goes_on_after_an_error_nobody_foresaw(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.ask()
    step = await world.step_of("a")
    former = world.owned

    def stumble(*_: Any) -> Any:
        raise KeyError("nobody foresaw this")

    monkeypatch.setattr(former.scheduler, "observe_all", stumble)
    await world.answer("a", step)
    await world.until(lambda: world.starting.owned.get("e") not in (None, former))
    assert former.closed
    await play(world, "bc")
    assert await world.outcome() == [4.0]
    assert world.asked == ["a", "b", "c"]
    await world.until_tidy()


async def test_what_comes_while_an_ensemble_is_taken_over_is_begun(world: World) -> None:
    await world.ask()  # so that there is a queue to follow
    await play(world, "abc")
    await world.until_tidy()
    world.log.slow = keys.replies(keys.ensemble_endpoint("e"))
    taking = asyncio.create_task(world.new_owner())
    await world.log.waits.wait()
    await world.ask()
    for _ in range(100):  # time enough to hear of it
        await asyncio.sleep(0)
    world.log.go.set()
    await taking
    await play(world, "abc")
    async with asyncio.timeout(PATIENCE_S):
        while len(await world.log.range(keys.replies(CALLER))) < 2:
            await asyncio.sleep(0.001)


async def test_a_caller_that_leaves_while_an_ensemble_is_taken_over_is_not_worked_for(world: World) -> None:
    await world.ask()
    await world.step_of("a")
    await world.stop_owner()
    world.log.slow = keys.replies(keys.ensemble_endpoint("e"))
    taking = asyncio.create_task(world.new_owner())
    await world.log.waits.wait()
    await world.tell(ProcessLeft("gateway", CALLER, "drained"))
    await world.until(lambda: CALLER in world.starting._departed.endpoints)
    world.log.go.set()
    await taking
    await world.until(lambda: world.log._work["e"].requests == {})
    assert world.asked == ["a"]


async def test_no_step_is_asked_twice_of_a_request_whose_blob_a_successor_reads_slowly(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.ask(blob="blob-1")
    await play(world, "ab")
    await world.step_of("c")
    await world.stop_owner()
    reads, go, blob = asyncio.Event(), asyncio.Event(), world.log.blob

    async def slowly(blob_id: str) -> bytes | None:
        reads.set()
        await go.wait()
        return await blob(blob_id)

    monkeypatch.setattr(world.log, "blob", slowly)
    await world.new_owner()
    await reads.wait()
    await world.owned.look_after()
    go.set()

    await world.until(lambda: world.owned._flights.flights)
    assert [flight.model for flight in world.owned._flights.flights.values()] == ["c"]
    for model in "ab":
        assert await world.log.range(keys.queue(model, 0), world._seen[model]) == []


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_log_that_fails_is_asked_again_and_nothing_is_asked_twice(world: World, when: str) -> None:
    world.log.failing = {"b": [when]}
    await world.ask()
    await play(world, "abc")
    assert await world.outcome() == [4.0]
    assert await world.log.range(keys.queue("b", 0), world._seen["b"]) == []


async def test_a_step_that_the_log_can_never_take_ends_its_request(world: World) -> None:
    """Its inputs may be answers of several steps, each as large as an answer may be."""
    world.log.failing["b"] = ["too large"] * 1000
    await world.ask()
    await play(world, "a")
    error = await world.outcome()
    assert error.code.name == "INVALID_ARG"
    assert error.message.startswith("in ensemble 'e', 1073741824 bytes are more than the event log takes at once")
    assert len(world.log.failing["b"]) == 999
    await world.until_tidy()


async def test_a_step_beside_one_that_the_log_can_never_take_is_not_sent_for_a_request_that_has_failed(
    world: World,
) -> None:
    """Both became ready together, so that they share an entry."""
    world.log.failing["a"] = ["a third try", "too large", "too large"]
    await world.ask("pair")
    assert (await world.outcome()).code.name == "INVALID_ARG"
    await world._running[0].owned["pair"].settled()
    assert world.log.failing["a"] == ["a third try"]


async def test_a_step_that_fails_ends_its_request(world: World) -> None:
    await world.ask()
    await play(world, "a")
    await world.answer("b", await world.step_of("b"), error=True)
    error = await world.outcome()
    assert (error.message, error.code) == ("in ensemble 'e', too much", Unavailable.code)
    await world.until_tidy()


async def test_a_request_that_is_given_up_takes_its_steps_along(world: World) -> None:
    await world.ask()
    step = await world.step_of("a")
    await world.log.append(keys.facts("e"), [FIELD_FACT, pack_fact(RequestCancelled(REQUEST))])
    assert (await world.outcome()).code.name == "CANCELLED"
    # the owner of the step's model is told, and rejects what waits
    await world.until(lambda: world.log._work["a"].requests == {})
    assert step.id == step_id(REQUEST, 0, ())
    await world.until_tidy()


@pytest.mark.parametrize(
    ("model", "steps"), [("flow", ["stream"]), ("outer flow", ["flow", "stream"]), ("around", [NESTED, "a"])]
)
async def test_steps_are_cancelled_whose_request_ended_while_the_ensemble_had_no_owner(
    world: World, monkeypatch: pytest.MonkeyPatch, model: str, steps: list[str]
) -> None:
    """For example a job that a gateway cancelled. A stream may send nothing until more responses are wanted."""
    await world.until(lambda: {model, *steps} <= world._running[0].owned.keys())
    await world.ask(model)
    record = await world.step_of(steps[-1])
    await world.stop_owner()
    assert await world.log.unsettled(steps[-1], [record.id]) == [0]
    assert await world.log.settle(model, [(REQUEST, 1)], None, []) == [True]
    monkeypatch.setattr("batcher.housekeeping.model_checks._LOOK_NS", 0)
    monkeypatch.setattr(periodic_checks, "_VERIFY_S", 0.001)
    await world.new_owner()
    for one in steps:
        await world.until(lambda one=one: not world.log._work[one].requests)


async def test_a_stream_of_a_request_that_runs_is_left_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batcher.housekeeping.model_checks._LOOK_NS", 0)
    monkeypatch.setattr(periodic_checks, "_VERIFY_S", 0.001)
    looks: list[str] = []
    look = ModelChecks.look

    async def looked(checks: ModelChecks) -> None:
        await look(checks)
        looks.append(checks._owned.model)

    monkeypatch.setattr(ModelChecks, "look", looked)
    await world.new_owner()
    await world.until(lambda: {"stream", "flow", "outer flow"} <= world._running[0].owned.keys())
    await world.ask("outer flow")
    record = await world.step_of("stream")
    looks.clear()
    await world.until(lambda: looks.count("stream") >= 3 and looks.count("flow") >= 3)
    assert await world.log.unsettled("stream", [record.id]) == [0]
    await world.answer("stream", record)
    assert await world.outcome() == [2.0]


async def test_answers_are_kept_for_a_request_that_comes_to_their_step_later(world: World) -> None:
    """The former owner had the answer before from the cache, which keeps it no longer."""
    await world.ask()
    first = await world.step_of("a")
    await world.stop_owner()
    answer = pack_response(step_id(REQUEST, 1, ()), "b", 1, [Tensor.of("o", np.full((1,), 8, np.float32))], {})
    await world.log.append(keys.replies(first.endpoint), record_fields([answer]))
    await world.new_owner()
    await world.until(lambda: world.owned._answers.any_aside and not world.owned.scheduler.unbegun())
    for _ in range(3):
        await world.owned.look_after()
    await world.answer("a", first)
    await play(world, "c")
    assert await world.outcome() == [9.0]
    assert await world.log.pending("b") == (0, 0)
    await world.until_tidy()


async def test_a_former_owner_deletes_no_answers(world: World) -> None:
    """It stalled, and does not know the requests that their steps belong to."""
    stream = keys.replies(keys.ensemble_endpoint("e"))
    former = world.owned
    assert await world.log.take_ownership("e", "batcher-2", "batcher-1") > former.token
    await world.log.append(stream, record_fields([pack_response(bytes(16), "a", 1, [], {})]))
    await world.until(lambda: former._answers.any_aside)
    await former.look_after()
    await former.settled()
    assert await world.log.range(stream)
    assert former.closed


async def test_answers_that_a_request_may_need_are_not_kept_without_a_bound(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "_MAX_ASIDE", 1)
    await world.ask()
    first = await world.step_of("a")
    await world.new_owner()
    for count in (1, 2):
        answer = pack_response(bytes([count] * 16), "b", 1, [], {}, final=False, place=(1, 0))
        await world.log.append(keys.replies(first.endpoint), record_fields([answer]))
        await world.until(lambda count=count: world.owned._answers.aside == count)
        await world.owned.look_after()
        assert world.owned._answers.any_aside == (count == 1)
    await world.answer("a", first)
    await play(world, "bc")
    assert await world.outcome() == [4.0]
    await world.until_tidy()


async def test_a_step_that_the_log_lost_is_asked_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batcher.ensembles.submission._LOST_AFTER_NS", 0)
    await world.ask()
    lost = await world.step_of("a")
    assert await world.log.settle("a", [(lost.id, 1)], None, []) == [True]  # its answer is nowhere
    await world.owned.look_after()
    await world.owned.look_after()
    again = await world.step_of("a")
    assert again.id == lost.id
    await world.answer("a", again)
    await play(world, "bc")
    assert await world.outcome() == [4.0]


async def test_what_fails_for_one_model_keeps_no_other_from_being_looked_at(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: set[str] = set()

    async def look(owned: Any, _min_age_ns: int) -> None:
        looked.add(owned.model)
        raise RuntimeError(owned.model)

    monkeypatch.setattr(periodic_checks, "verify", look)
    monkeypatch.setattr(periodic_checks, "_VERIFY_S", 0.001)
    await world.new_owner()
    await world.until(lambda: looked == CONFIGS.keys())


async def test_answers_nobody_awaits_are_not_kept(world: World) -> None:
    stream = keys.replies(keys.ensemble_endpoint("e"))
    await world.log.append(stream, record_fields([pack_response(bytes(16), "a", 1, [], {}), b"no record"]))
    await world.ask()
    await play(world, "abc")
    assert await world.outcome() == [4.0]
    await world.owned.look_after()
    await world.until_tidy()
