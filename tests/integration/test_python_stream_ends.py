"""Response senders of python models: cancels, deaths, slow takers and what is kept of what has ended."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from python_instances import IDENTITY, Load
from python_senders import DECOUPLED, PATIENCE_S, Responses, loading, request, run

from charonia.backend import InstanceDied
from charonia.errors import CharoniaError


@pytest.fixture
async def load(tmp_path: Path) -> AsyncIterator[Load]:
    async with loading(tmp_path) as load:
        yield load


async def test_a_cancel_is_seen_by_sender_and_request_after_execute_returned(load: Load) -> None:
    instance = await load("""
        def execute(self, requests):
            for request in requests:
                if value_of(request) == 1:
                    threading.Thread(target=self.until_cancelled, args=(request,)).start()
                else:
                    request.get_response_sender().send(response(0), FINAL)

        def until_cancelled(self, request):
            sender = request.get_response_sender()
            sender.send(response(float(sender.is_cancelled())))
            while not (request.is_cancelled() and sender.is_cancelled()):
                time.sleep(0.002)
            sender.send(response(1), FINAL)
    """)
    unwanted, responses = request(1), Responses(1)
    going = asyncio.ensure_future(instance.execute_stream([unwanted], responses))
    await asyncio.wait_for(responses.freed.wait(), PATIENCE_S)
    await responses.until(lambda: len(responses.responses[0]) == 1)
    await run(instance, 2)
    instance.cancel_requests([unwanted])
    await asyncio.wait_for(going, PATIENCE_S)
    assert responses.told() == [0, 1]


async def test_a_fast_model_waits_for_who_takes_its_responses(load: Load) -> None:
    instance = await load("""
        made = 0

        def execute(self, requests):
            threading.Thread(target=self.flood, args=(requests[0],)).start()

        def flood(self, request):
            sender = request.get_response_sender()
            big = np.zeros((1, 65536), np.float32)
            for number in range(200):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", big)]))
                type(self).made += 1
                print("made", type(self).made, flush=True)
            sender.send(flags=FINAL)
    """)
    responses = Responses(1)
    responses.room.clear()
    going = asyncio.ensure_future(instance.execute_stream([request(1)], responses))
    await responses.until(lambda: len(responses.responses[0]) > 0)

    def made() -> str:
        return instance._child.last_lines().splitlines()[-1] if instance._child.last_lines() else ""

    last = ""
    async with asyncio.timeout(PATIENCE_S):
        while not last or made() != last:  # 50 MiB in all; a few go into the socket's buffers
            last = made()
            await asyncio.sleep(0.2)
    assert 0 < int(last.split()[1]) < 40
    assert len(responses.responses[0]) < 10
    responses.room.set()
    await asyncio.wait_for(going, PATIENCE_S)
    assert len(responses.responses[0]) == 200


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_an_exception_after_the_last_response_is_in_the_log(
    load: Load, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    instance = await load(f"""
        {kind} execute(self, requests):
            for request in requests:
                request.get_response_sender().send(response(1), FINAL)
            raise ValueError("what no caller reads")
    """)
    responses = Responses(1)
    with contextlib.suppress(CharoniaError):
        await asyncio.wait_for(instance.execute_stream([request(1)], responses), PATIENCE_S)
    assert responses.told() == [1]
    async with asyncio.timeout(PATIENCE_S):
        while not (found := [one for one in caplog.records if "ValueError: what no caller reads" in one.getMessage()]):
            await asyncio.sleep(0.01)
    assert [one.levelname for one in found] == ["ERROR"]
    assert "model.py" in found[0].getMessage()


async def test_a_death_ends_every_call_with_open_senders(load: Load) -> None:
    instance = await load("""
        def execute(self, requests):
            value = value_of(requests[0])
            if value == 3:
                import os
                os._exit(7)
            self.kept = getattr(self, "kept", [])
            self.kept.append(requests[0].get_response_sender())
            self.kept[-1].send(response(value))
    """)
    calls = []
    for value in (1, 2):
        responses = Responses(1)
        calls.append(asyncio.ensure_future(instance.execute_stream([request(value)], responses)))
        await asyncio.wait_for(responses.freed.wait(), PATIENCE_S)
    calls.append(asyncio.ensure_future(instance.execute_stream([request(3)], Responses(1))))
    for call in calls:
        with pytest.raises(InstanceDied, match="exited with code 7"):
            await asyncio.wait_for(call, PATIENCE_S)


async def test_a_model_that_goes_on_answering_is_not_taken_for_one_that_hangs(load: Load) -> None:
    ceiling = ' parameters { key: "charonia.max_execution_s" value { string_value: "2.5" } }'
    instance = await load(
        """
        def execute(self, requests):
            sender = requests[0].get_response_sender()
            for number in range(30):
                time.sleep(0.1)
                sender.send(response(number))
            if value_of(requests[0]) == 2:
                time.sleep(60)
            sender.send(flags=FINAL)
    """,
        DECOUPLED + ceiling,
    )
    assert (await run(instance, 1)).told() == list(range(30))
    with pytest.raises(InstanceDied, match=r"it ran longer than 2\.5 s \(charonia\.max_execution_s\)"):
        await run(instance, 2)


async def test_nothing_is_kept_of_what_has_ended(load: Load) -> None:
    instance = await load("""
        def execute(self, requests):
            for request in requests:
                request.get_response_sender().send(response(1), FINAL)
    """)
    for _ in range(20):
        await run(instance, 1, 2)
    gc.collect()
    child = instance._child
    assert not (child._streams)
    assert not (child._last_response_s)
    assert not (child._timers)
    assert not (instance._executing)


async def test_a_model_that_is_not_decoupled_frees_its_instance_too(load: Load) -> None:
    """The first request is answered by the second call of execute, which so must come before."""
    instance = await load(
        """
        kept = []

        def execute(self, requests):
            for request in requests:
                if value_of(request) == 1:
                    self.kept.append(request.get_response_sender())
            answers = [None if value_of(r) == 1 else response(value_of(r)) for r in requests]
            if answers[0] is not None:
                for sender in self.kept:
                    sender.send(response(9), FINAL)
                self.kept.clear()
            return answers
        """,
        IDENTITY,
    )
    assert instance.answers_later
    first = Responses(2)
    going = asyncio.ensure_future(instance.execute_stream([request(1), request(3)], first))
    await asyncio.wait_for(first.freed.wait(), PATIENCE_S)
    assert (first.ended, first.told(1)) == ([False, True], [3])
    assert (await run(instance, 2)).told() == [2]
    await asyncio.wait_for(going, PATIENCE_S)
    assert first.told(0) == [9]


async def test_an_instance_whose_code_has_no_senders_does_not_answer_later(load: Load) -> None:
    assert not (await load("def execute(self, requests):\n    return []", IDENTITY)).answers_later


@pytest.mark.parametrize("where", ["execute", "thread"])
async def test_a_sender_waits_until_more_is_wanted(load: Load, where: str) -> None:
    """S55: within its window a model sends, then it waits; a cancel lets it go."""
    instance = await load(
        """
        def execute(self, requests):
            for request in requests:
                work = (request.get_response_sender(), int(value_of(request)))
                if "WHERE" == "thread":
                    threading.Thread(target=self.answer, args=work, daemon=True).start()
                else:
                    self.answer(*work)

        def answer(self, sender, count):
            for number in range(count):
                if sender.is_cancelled():
                    break
                sender.send(response(number))
            sender.send(flags=FINAL)
    """.replace("WHERE", where)
    )
    asked, free = request(10, window=3), request(6)
    responses = Responses(2)
    call = asyncio.create_task(instance.execute_stream([asked, free] if where == "thread" else [asked], responses))
    await responses.until(lambda: len(responses.responses[0]) == 3)
    if where == "thread":
        await responses.until(lambda: responses.ended[1])
        assert len(responses.responses[1]) == 6, "the other one is not held back"
    assert not call.done()
    instance.allow_responses(asked, 5)
    await responses.until(lambda: len(responses.responses[0]) == 5)
    assert not responses.ended[0]
    instance.allow_responses(asked, 4)
    instance.cancel_requests([asked])
    await responses.until(lambda: responses.ended[0])
    assert responses.told(0)[:5] == [0, 1, 2, 3, 4]
    assert len(responses.responses[0]) <= 6
    async with asyncio.timeout(PATIENCE_S):
        await call
