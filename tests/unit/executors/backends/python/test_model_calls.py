"""What an executor makes of the calls of a model process: frames in, frames out, nothing left open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from charonia.backend import ModelRequest, ModelResponse, OpenCall
from charonia.datatypes import DataType
from charonia.errors import Cancelled, CharoniaError, NotFound, Unavailable
from charonia.inference import InferenceRequest
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from executors.backends.python.child_process import ChildProcess
from executors.backends.python.model_calls import PendingModelCalls
from executors.backends.python.protocol.frames import Frame, FrameError, Kind, pack, tensor_offsets
from protos.model_config_pb2 import ModelConfig

ONE = Tensor("Y", DataType.INT32, (1,), b"\1\0\0\0")
PLAIN = ModelInterface.of(ModelConfig(name="m", backend="python"))
SEVERAL = ModelInterface.of(ModelConfig(name="m", backend="python", model_transaction_policy={"decoupled": True}))


class FakeChild:
    """Keeps what is answered, by the number of the call."""

    def __init__(self) -> None:
        self.said: dict[int, list[tuple[Kind, Any]]] = {}
        self.asked: Callable[[Frame], None]
        self.gone: Callable[[], None]
        self.slow = asyncio.Event()
        self.slow.set()

    def on_model_requests(self, asked: Callable[[Frame], None], gone: Callable[[], None]) -> None:
        self.asked, self.gone = asked, gone

    def answer(self, kind: Kind, number: int, content: Any, data: Sequence[bytes] = ()) -> None:
        self.said.setdefault(number, []).append((kind, content))

    async def drained(self) -> None:
        await self.slow.wait()


class FakeCall:
    def __init__(self, answers: list[ModelResponse | CharoniaError]) -> None:
        self.answers = answers
        self.waiting = asyncio.Event()
        self.cancelled = False
        self.asked_to_end = 0

    async def next(self) -> ModelResponse | None:
        if not self.answers:
            await self.waiting.wait()
            return None
        answer = self.answers.pop(0)
        if isinstance(answer, CharoniaError):
            raise answer
        return answer

    def cancel(self) -> None:
        self.cancelled = True

    def ask_to_end(self) -> None:
        self.asked_to_end += 1


class FakeCalls:
    """Every model there is but `nobody` answers with `answers`."""

    def __init__(self) -> None:
        self.answers: list[ModelResponse | CharoniaError] = []
        self.interface = PLAIN
        self.opened: list[tuple[InferenceRequest, str, list[object]]] = []
        self.blocking: list[bool] = []
        self.calls: list[FakeCall] = []
        self.controlled: list[Any] = []

    async def find(self, model: str, version: int) -> ModelInterface:
        if model == "nobody":
            raise NotFound("Request for unknown model: 'nobody' is not found")
        return self.interface

    async def open(
        self, request: InferenceRequest, model: str, origins: Sequence[object], *, blocks: bool = False
    ) -> OpenCall:
        self.opened.append((request, model, list(origins)))
        self.blocking.append(blocks)
        self.calls.append(FakeCall(list(self.answers)))
        return self.calls[-1]

    async def load(self, model: str, config_json: str, files: dict[str, bytes]) -> None:
        self.controlled.append((model, config_json, files))

    async def unload(self, model: str, *, unload_dependents: bool) -> None:
        raise Unavailable("explicit model load / unload is not allowed if polling is enabled")

    async def is_ready(self, model: str, version: str) -> bool:
        return (model, version) == ("m", "2")


def request(origin: object) -> ModelRequest:
    return ModelRequest("", 0, [], (), {}, origin=origin)


def frame(kind: Kind, number: int, content: Any, data: Sequence[bytes] = ()) -> Frame:
    written = b"".join(bytes(buffer) for buffer in pack(kind, number, content, data))
    packed = pack(kind, number, content)
    meta = bytes(packed[0])[-(len(packed[0]) - 20) :]
    assert written.find(meta) == 20
    return Frame(kind, number, meta, memoryview(bytearray(written[20 + len(meta) :])))


def call_frame(
    number: int,
    *,
    execute: int = 1,
    surely: bool = True,
    blocks: bool = False,
    model: str = "m",
    decoupled: bool = False,
) -> Frame:
    tensors = [["X", 8, [1], 4]]
    content = [execute, surely, blocks, model, -1, ["Y"], "r", "sequence", 3, 5, {"a": 1}, decoupled, tensors]
    return frame(Kind.CALL, number, content, [b"\7\0\0\0"])


class World:
    def __init__(self) -> None:
        self.child = FakeChild()
        self.calls = FakeCalls()
        self.batches: dict[int, Sequence[ModelRequest]] = {1: [request("a"), request("b")]}
        self.asked = PendingModelCalls(cast(ChildProcess, self.child), "mine", self.calls, self.batches)

    async def ask(self, *frames: Frame) -> None:
        for one in frames:
            self.child.asked(one)
        for _ in range(20):
            await asyncio.sleep(0)

    def kinds(self, number: int) -> list[Kind]:
        return [kind for kind, _ in self.child.said.get(number, [])]

    def error(self, number: int) -> tuple[int, str]:
        content = self.child.said[number][-1][1]
        return content[0][0], content[0][1]


@pytest.fixture
async def world() -> World:
    return World()


def test_frames_are_cut_as_the_test_cuts_them() -> None:
    assert call_frame(3).content()[3] == "m"
    assert bytes(call_frame(3).data[tensor_offsets([4])[0] :][:4]) == b"\7\0\0\0"


async def test_a_call_is_answered(world: World) -> None:
    world.calls.answers = [ModelResponse([ONE], {"k": "v"})]
    await world.ask(call_frame(7))
    assert world.child.said == {7: [(Kind.LAST_ANSWER, [None, {"k": "v"}, [("Y", 8, (1,), 4)]])]}
    ((made, model, origins),) = world.calls.opened
    assert (model, origins) == ("mine", ["a", "b"])
    assert (made.model, made.version, made.outputs, made.id, made.parameters) == ("m", -1, ("Y",), "r", {"a": 1})
    assert (made.sequence_id, made.sequence_start, made.sequence_end, made.timeout_us) == ("sequence", True, True, 5)
    assert [bytes(tensor.data) for tensor in made.inputs] == [b"\7\0\0\0"]
    assert (world.asked.open_calls, world.calls.calls[0].cancelled) == (0, True)


async def test_several_answers_and_their_end(world: World) -> None:
    world.calls.interface = SEVERAL
    world.calls.answers = [ModelResponse([ONE]), ModelResponse([ONE])]
    await world.ask(call_frame(7, decoupled=True))
    assert world.kinds(7) == [Kind.ANSWER, Kind.ANSWER]
    world.calls.calls[0].waiting.set()
    await world.ask()
    assert world.child.said[7][-1] == (Kind.LAST_ANSWER, None)


async def test_a_model_process_that_does_not_read_is_waited_for(world: World) -> None:
    world.calls.answers = [ModelResponse([ONE])] * 3
    world.child.slow.clear()
    await world.ask(call_frame(7, decoupled=True))
    assert world.kinds(7) == [Kind.ANSWER]
    world.child.slow.set()
    await world.ask()
    assert world.kinds(7) == [Kind.ANSWER] * 3


async def test_what_goes_wrong_is_an_answer(world: World) -> None:
    await world.ask(call_frame(1, model="nobody"))
    assert world.error(1) == (
        1,
        "Model nobody - Error when running inference: Failed for execute the inference request. Model 'nobody' is not "
        "ready.",
    )
    world.calls.answers = [Unavailable("deadlock: a -> a")]
    await world.ask(call_frame(2))
    assert world.error(2) == (4, "deadlock: a -> a")
    world.calls.interface = SEVERAL
    await world.ask(call_frame(3))
    assert world.error(3) == (
        1,
        "Model m - Error when running inference: "
        "Model m is using the decoupled. The current BLS request call doesn't support models using the decoupled "
        "transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled "
        "models.'",
    )
    assert world.asked.open_calls == 0


async def test_a_call_that_is_given_up_is_cancelled_and_answered(world: World) -> None:
    await world.ask(call_frame(7), frame(Kind.GIVE_UP, 7, None), frame(Kind.GIVE_UP, 8, None))
    assert (world.error(7), world.asked.open_calls) == ((int(Cancelled.code), ""), 0)
    await world.ask(call_frame(9))
    await world.ask(frame(Kind.GIVE_UP, 9, None))
    assert (world.error(9), world.calls.calls[-1].cancelled, world.asked.open_calls) == ((7, ""), True, 0)


async def test_a_call_that_is_cancelled_gently_goes_on(world: World) -> None:
    world.calls.answers = [ModelResponse([ONE])]
    world.calls.interface = SEVERAL
    await world.ask(call_frame(7, decoupled=True), frame(Kind.GIVE_UP, 7, True), frame(Kind.GIVE_UP, 8, True))
    (call,) = world.calls.calls
    assert (call.asked_to_end, call.cancelled, world.kinds(7)) == (1, False, [Kind.ANSWER])
    await world.ask(frame(Kind.GIVE_UP, 7, True))
    assert (call.asked_to_end, call.cancelled) == (2, False)
    call.waiting.set()
    await world.ask()
    assert (world.kinds(7), world.asked.open_calls) == ([Kind.ANSWER, Kind.LAST_ANSWER], 0)
    # its iterator is lost before it ends
    await world.ask(call_frame(9, decoupled=True))
    await world.ask(frame(Kind.GIVE_UP, 9, True), frame(Kind.GIVE_UP, 9, False))
    assert (world.error(9), world.calls.calls[-1].cancelled, world.asked.open_calls) == ((7, ""), True, 0)


async def test_the_calls_of_a_batch_that_nobody_wants_are_cancelled(world: World) -> None:
    world.batches[2] = [request("c")]
    await world.ask(call_frame(1), call_frame(2, execute=2), call_frame(3, execute=2, surely=False))
    world.asked.cancel_those_of(2)
    await world.ask()
    assert [number for number in (1, 2, 3) if world.kinds(number)] == [2]
    world.asked.cancel_those_of(1)
    world.asked.cancel_those_of(5)
    await world.ask()
    assert world.asked.open_calls == 1


async def test_for_whom_a_call_is_made(world: World) -> None:
    """Only what is sure is inherited: a wrong caller would be worse than none."""
    await world.ask(call_frame(1, surely=False))
    world.batches[2] = [request("c")]
    await world.ask(call_frame(2, execute=2), call_frame(3, execute=2, surely=False), call_frame(4, execute=9))
    assert [origins for _, _, origins in world.calls.opened] == [["a", "b"], ["c"], [], []]


async def test_the_end_of_the_process_ends_its_calls(world: World) -> None:
    await world.ask(call_frame(1), call_frame(2, decoupled=True))
    assert world.asked.open_calls == 2
    world.child.gone()
    await world.ask()
    assert (world.asked.open_calls, [call.cancelled for call in world.calls.calls]) == (0, [True, True])


async def test_models_are_loaded_and_asked_for(world: World) -> None:
    files = [["1/model.py", 4], ["1/weights", 0]]
    await world.ask(frame(Kind.CONTROL, 1, ["load", "m", "{}", files], [b"code", b""]))
    assert world.calls.controlled == [("m", "{}", {"1/model.py": b"code", "1/weights": b""})]
    await world.ask(
        frame(Kind.CONTROL, 2, ["is_ready", "m", "2"]),
        frame(Kind.CONTROL, 3, ["is_ready", "m", "x"]),
        frame(Kind.CONTROL, 6, ["is_ready", "m", "-1"]),
        frame(Kind.CONTROL, 7, ["is_ready", "m", "2x"]),
        frame(Kind.CONTROL, 9, ["is_ready", "m", "9" * 5000]),
        frame(Kind.CONTROL, 8, ["load", "", "", []]),
        frame(Kind.CONTROL, 4, ["unload", "m", False]),
        frame(Kind.CONTROL, 5, ["dance", "m"]),
    )
    assert world.child.said[1] == [(Kind.LAST_ANSWER, [None, None])]
    assert world.child.said[2] == [(Kind.LAST_ANSWER, [None, True])]
    said = "failed to get model version from specified version string"
    assert world.error(3)[1] == f"{said} 'x' (details: stol), version should be an integral value > 0"
    assert world.error(6)[1] == f"{said} '-1', version should be an integral value > 0"
    assert "(details: stol)" in world.error(9)[1]
    assert world.child.said[7] == [(Kind.LAST_ANSWER, [None, True])]
    assert world.error(8)[1] == "failed to load '', failed to poll from model repository"
    assert world.error(4) == (4, "explicit model load / unload is not allowed if polling is enabled")
    assert "cannot ask for 'dance'" in world.error(5)[1]


async def test_a_load_that_fails_in_an_unknown_way_is_answered(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The model waits for the answer without a time limit."""
    broken = Kind.CONTROL, ["load", "m", "{}", [["1/model.py", "four"]]]
    await world.ask(frame(Kind.CONTROL, 1, ["unload"]), frame(broken[0], 2, broken[1]))
    for number, text in ((1, "ValueError: "), (2, "FrameError: ")):
        assert world.kinds(number) == [Kind.LAST_ANSWER]
        assert (world.error(number)[0], world.error(number)[1].startswith(text)) == (1, True)
    assert (world.asked.open_calls, len(caplog.records)) == (0, 2)


async def test_where_nobody_can_be_called_it_is_said(world: World) -> None:
    asked = PendingModelCalls(cast(ChildProcess, world.child), "mine", None, {})
    await world.ask(call_frame(1), frame(Kind.CONTROL, 2, ["unload", "m", False]))
    assert (world.error(1)[0], world.error(2)[0], asked.open_calls) == (1, 5, 0)


@pytest.mark.parametrize(
    "content",
    [
        None,
        [1, True, False, "m"],
        [1, True, False, "m", "x", [], "", 0, 0, 0, {}, False, []],
        [1, True, False, "m", 1, [], "", 0, 0, 0, {}, False, [["X", 8, [1], 400]]],
        [1, True, False, "m", 1, [], "", 0, 0, 0, {}, False, [["X", 99, [1], 4]]],
        [1, True, False, "m", 1, [], "", 0, 0, 0, [], False, []],
    ],
)
async def test_a_call_that_cannot_be_read_is_told_of(world: World, content: Any) -> None:
    with pytest.raises(FrameError):
        world.child.asked(frame(Kind.CALL, 1, content, [b"\7\0\0\0"]))
    assert world.asked.open_calls == 0


async def test_a_number_is_used_once_at_a_time(world: World) -> None:
    await world.ask(call_frame(1))
    with pytest.raises(FrameError, match="open already"):
        world.child.asked(call_frame(1))


async def test_whether_a_call_holds_its_batch_up_is_passed_on(world: World) -> None:
    await world.ask(call_frame(1, blocks=True), call_frame(2))
    assert world.calls.blocking == [True, False]
