"""What the OpenAI API stores, over two gateways: responses, files and batches, and what becomes of them under kills.

The `openai` client is the witness. Started once; the tests that kill a gateway start one of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from e2e_asking import until
from e2e_parts import Part, parts_over_a_log
from told_texts import MODEL, Gates, told_model, words

from charonia import keys
from charonia.eventlog.redis import open_log

pytestmark = pytest.mark.e2e

LIMIT_S = 60
RESUMED_S = float(os.environ.get("CHARONIA_TEST_RESUMED_S", "20"))
"""The longest that another gateway may take for the next event of a stream; 0.5 is the goal on a quiet machine."""
LINES = 100


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("openai-stored")
    models = directory / "models"
    told_model(models)
    with parts_over_a_log(directory) as parts:

        def gateway(name: str) -> Part:
            return parts.gateway(name, "--openai-on-http-port=true")

        parts.start("batcher", "batcher")
        parts.start("executor", "executor", f"--model-repository={models}").until_says("executor is up")
        try:
            yield SimpleNamespace(
                gateway=gateway, first=gateway("first"), second=gateway("second"), log_url=parts.log_url
            )
        finally:
            close_clients()


_clients: list[Any] = []


def client(part: Part) -> Any:
    """A client of a gateway, closed at the end of the tests."""
    made = openai.OpenAI(base_url=f"http://{part.http}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)
    _clients.append(made)
    return made


def close_clients() -> None:
    while _clients:
        _clients.pop().close()


# -- responses ---------------------------------------------------------------------------------------------------------


def test_a_response_is_read_at_another_gateway(stack: Any) -> None:
    made = client(stack.first).responses.create(
        model=MODEL, input="hello", max_output_tokens=3, metadata={"a": "b"}, instructions="be brief"
    )
    assert made.status == "incomplete"
    assert made.incomplete_details.reason == "max_output_tokens"
    assert len(made.output_text.split()) == 3
    assert made.usage.output_tokens == 3
    read = client(stack.second).responses.retrieve(made.id)
    assert read.model_dump() == made.model_dump()
    items = client(stack.second).responses.input_items.list(made.id).data
    assert [item.content[0].text for item in items] == ["hello"]


def test_a_conversation_goes_on_at_another_gateway(stack: Any) -> None:
    first = client(stack.first).responses.create(model=MODEL, input="one", max_output_tokens=2)
    second = client(stack.second).responses.create(
        model=MODEL, input="two", max_output_tokens=2, previous_response_id=first.id
    )
    items = client(stack.first).responses.input_items.list(second.id, order="asc").data
    assert [item.content[0].text for item in items] == ["one", first.output_text, "two"]
    with pytest.raises(openai.BadRequestError) as refused:
        client(stack.first).responses.create(model=MODEL, input="x", previous_response_id="resp_none")
    assert refused.value.code == "previous_response_not_found"


def test_the_events_of_a_stream(stack: Any) -> None:
    with client(stack.first).responses.create(model=MODEL, input="x", max_output_tokens=2, stream=True) as stream:
        events = list(stream)
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text
    again = list(client(stack.second).responses.retrieve(events[0].response.id, stream=True))
    assert [event.model_dump() for event in again] == [event.model_dump() for event in events]


def test_what_is_not_stored_is_not_found(stack: Any) -> None:
    made = client(stack.first).responses.create(model=MODEL, input="x", store=False, max_output_tokens=2)
    assert len(made.output_text.split()) == 2
    with pytest.raises(openai.NotFoundError):
        client(stack.first).responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client(stack.first).responses.create(model=MODEL, input="x", store=False, background=True)
    assert refused.value.param == "background"


def test_a_background_response_is_cancelled_and_deleted(stack: Any, tmp_path: Path) -> None:
    gates = Gates(tmp_path / "gate")
    asking = client(stack.first)
    made = asking.responses.create(model=MODEL, input=f"gates={gates.prefix}", background=True)
    assert made.status == "queued"
    other = client(stack.second)
    until("it runs", lambda: other.responses.retrieve(made.id).status == "in_progress")
    assert other.responses.cancel(made.id).status == "cancelled"
    assert asking.responses.retrieve(made.id).status == "cancelled"
    events = [event.type for event in asking.responses.retrieve(made.id, stream=True)]
    assert events == ["response.created", "response.queued", "response.in_progress", "response.cancelled"]
    other.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        asking.responses.retrieve(made.id)


def test_a_model_that_fails(stack: Any) -> None:
    with pytest.raises(openai.InternalServerError, match="broken"):
        client(stack.first).responses.create(model=MODEL, input="fail=broken")
    asking = client(stack.first)
    made = asking.responses.create(model=MODEL, input="fail=broken", background=True)
    until("it failed", lambda: asking.responses.retrieve(made.id).status == "failed")
    assert "broken" in asking.responses.retrieve(made.id).error.message


@pytest.mark.parametrize("key", ["", "again"])
def test_a_client_that_leaves(stack: Any, tmp_path: Path, key: str) -> None:
    """Cancels its response, unless it can ask again."""
    gates = Gates(tmp_path / "gate")
    gates.open(0)
    asked: dict[str, Any] = {"model": MODEL, "input": f"gates={gates.prefix}", "max_output_tokens": 2, "stream": True}
    if key:
        asked["extra_headers"] = {"idempotency-key": key}
    with client(stack.first) as leaving, leaving.responses.create(**asked) as stream:
        made = next(iter(stream)).response
    other = client(stack.second)
    if not key:
        until("it is cancelled", lambda: other.responses.retrieve(made.id).status == "cancelled")
        return
    gates.open(1)
    with other.responses.create(**asked) as stream:
        events = list(stream)
    assert events[0].response.id == made.id
    assert events[-1].type == "response.incomplete"


def test_a_forced_call_of_a_tool(stack: Any) -> None:
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    asked = {"model": MODEL, "input": "x", "max_output_tokens": 3, "tools": [tool]}
    made = client(stack.first).responses.create(**asked, tool_choice={"type": "function", "name": "add"})
    (call,) = made.output
    assert (call.type, call.name, len(call.arguments.split())) == ("function_call", "add", 3)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    more = client(stack.second).responses.create(model=MODEL, input=[output], previous_response_id=made.id)
    items = client(stack.first).responses.input_items.list(more.id, order="asc").data
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]


def test_a_long_request_is_kept_as_well(stack: Any) -> None:
    text = "".join(chr(97 + at * at % 26) + hex(at) for at in range(60_000))
    made = client(stack.first).responses.create(model=MODEL, input=text, max_output_tokens=1)
    items = client(stack.second).responses.input_items.list(made.id).data
    assert items[0].content[0].text == text
    client(stack.second).responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client(stack.first).responses.retrieve(made.id)


def test_a_stream_goes_on_at_another_gateway_after_a_kill(stack: Any, tmp_path: Path) -> None:
    doomed = stack.gateway("doomed-stream")
    gates = Gates(tmp_path / "gate")
    gates.open(0, 1)
    asked = {"model": MODEL, "input": f"gates={gates.prefix}", "max_output_tokens": 5}
    seen: list[Any] = []
    with client(doomed).responses.create(**asked, background=True, stream=True) as stream:
        for event in stream:
            seen.append(event)
            if [one.type for one in seen].count("response.output_text.delta") == 2:
                break
        doomed.process.send_signal(signal.SIGKILL)
        doomed.process.wait()
    response_id = seen[0].response.id
    gates.open(2)
    other = client(stack.second)
    place, took_s = seen[-1].sequence_number, 60.0
    for _ in range(10):  # a busy machine may hold up some
        began_s = time.monotonic()
        with other.responses.retrieve(response_id, stream=True, starting_after=place) as stream:
            assert next(iter(stream)).type == "response.output_text.delta"
        took_s = min(took_s, time.monotonic() - began_s)
        if took_s <= RESUMED_S:
            break
    with other.responses.retrieve(response_id, stream=True, starting_after=place) as stream:
        seen.append(next(iter(stream)))
        gates.open(3, 4)
        seen += list(stream)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    deltas = [event.delta for event in seen if event.type == "response.output_text.delta"]
    assert len(deltas) == 5
    assert "".join(deltas) == seen[-1].response.output_text
    assert seen[-1].type == "response.incomplete"
    assert took_s <= RESUMED_S, took_s


# -- files -------------------------------------------------------------------------------------------------------------


def test_files(stack: Any) -> None:
    content = b"x" * 2_500_000 + b"\n"
    made = client(stack.first).files.create(file=("big.jsonl", content), purpose="batch")
    other = client(stack.second)
    assert (made.bytes, made.filename, made.purpose) == (len(content), "big.jsonl", "batch")
    assert made.expires_at > made.created_at
    assert other.files.retrieve(made.id) == made
    assert other.files.content(made.id).read() == content
    assert made.id in [file.id for file in other.files.list(purpose="batch")]
    assert other.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client(stack.first).files.content(made.id)
    with pytest.raises(openai.BadRequestError) as refused:
        other.files.create(file=("x", b"x"), purpose="fine-tune")
    assert refused.value.param == "purpose"
    short = other.files.create(
        file=("x", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert short.expires_at == short.created_at + 3600


# -- batches -----------------------------------------------------------------------------------------------------------


def chat_line(custom_id: str, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 2, **more}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def upload(part: Part, lines: list[Any]) -> str:
    content = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    return str(client(part).files.create(file=("in.jsonl", content.encode()), purpose="batch").id)


def begin(part: Part, lines: list[Any], endpoint: str = "/v1/chat/completions") -> Any:
    return client(part).batches.create(
        input_file_id=upload(part, lines), endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )


def ended(part: Part, batch_id: str) -> Any:
    def look() -> Any:
        batch = client(part).batches.retrieve(batch_id)
        return batch if batch.status in ("completed", "failed", "expired", "cancelled") else None

    return until(f"{batch_id} ends", look)


def lines_of(part: Part, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client(part).files.content(file_id).read().splitlines()]


def test_a_batch_of_chats(stack: Any) -> None:
    lines = [chat_line(f"id-{at}", f"prompt {at}", seed=7) for at in range(20)]
    made = begin(stack.first, [*lines, "", chat_line("fails", "fail=broken")])
    assert made.status == "validating"
    assert made.object == "batch"
    done = ended(stack.second, made.id)
    assert done.status == "completed"
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (21, 20, 1)
    answers = {line["custom_id"]: line for line in lines_of(stack.second, done.output_file_id)}
    assert sorted(answers) == sorted(line["custom_id"] for line in lines)
    for at in range(20):
        body = answers[f"id-{at}"]["response"]["body"]
        assert answers[f"id-{at}"]["response"]["status_code"] == 200
        assert body["choices"][0]["message"]["content"] == words(f"user: prompt {at}\nassistant:", 7, 2)
    (error,) = lines_of(stack.second, done.error_file_id)
    assert error["custom_id"] == "fails"
    assert error["response"]["status_code"] == 500
    assert "broken" in error["response"]["body"]["error"]["message"]
    assert made.id in [batch.id for batch in client(stack.first).batches.list(limit=100)]
    assert done.usage.output_tokens == 40


def test_a_batch_of_responses(stack: Any) -> None:
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 2}
    lines = [{"custom_id": f"r{at}", "method": "POST", "url": "/v1/responses", "body": body} for at in range(3)]
    done = ended(stack.first, begin(stack.first, lines, "/v1/responses").id)
    answers = lines_of(stack.first, done.output_file_id)
    assert sorted(line["custom_id"] for line in answers) == ["r0", "r1", "r2"]
    made = answers[0]["response"]["body"]
    assert client(stack.second).responses.retrieve(made["id"]).output_text == made["output"][0]["content"][0]["text"]


def test_a_file_is_valid_as_a_whole(stack: Any) -> None:
    wrong = chat_line("c", "x")
    wrong["url"] = "/v1/embeddings"
    lines = [chat_line("a", "x"), "{", chat_line("a", "y"), wrong, chat_line("d", "x", model="other")]
    done = ended(stack.first, begin(stack.first, lines).id)
    assert done.status == "failed"
    assert done.output_file_id is None
    found = [(error.line, error.code) for error in done.errors.data]
    assert found == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "invalid_url"),
        (5, "mismatched_model"),
    ]


def test_a_cancelled_batch_keeps_what_is_done(stack: Any, tmp_path: Path) -> None:
    gates = Gates(tmp_path / "gate")
    lines = [chat_line(f"done-{at}", f"prompt {at}") for at in range(5)]
    lines += [chat_line(f"held-{at}", f"prompt {at} gates={gates.prefix}") for at in range(40)]
    made = begin(stack.first, lines)
    other = client(stack.second)
    until("five are done", lambda: other.batches.retrieve(made.id).request_counts.completed == 5)
    assert other.batches.cancel(made.id).status in ("cancelling", "cancelled")
    done = ended(stack.first, made.id)
    assert done.status == "cancelled"
    assert done.cancelled_at
    assert sorted(line["custom_id"] for line in lines_of(stack.first, done.output_file_id)) == [
        f"done-{at}" for at in range(5)
    ]
    rest = lines_of(stack.first, done.error_file_id)
    assert {line["error"]["code"] for line in rest} == {"batch_cancelled"}
    assert sorted(line["custom_id"] for line in rest) == sorted(f"held-{at}" for at in range(40))


def driver(stack: Any, batch_id: str) -> int:
    """The pid of the gateway that drives a batch; 0 if none does."""

    async def owner() -> str:
        log = open_log(stack.log_url)
        await log.open()
        try:
            return (await log.owner(keys.batch_owner(batch_id)))[0]
        finally:
            await log.close()

    found = asyncio.run(owner())
    return int(found.split("-")[-2]) if found else 0


@pytest.mark.parametrize("at", [10, 50, 90])
def test_a_batch_outlives_the_gateway_that_drives_it(stack: Any, tmp_path: Path, at: int) -> None:
    doomed = stack.gateway(f"doomed-batch-{at}")
    gates = Gates(tmp_path / "gate")
    gates.open(0, 1)
    hold = f" gates={gates.prefix}-held"
    for attempt in range(50):
        runs = tmp_path / f"runs-{attempt}"
        lines = [
            chat_line(f"id-{number}", f"{number} runs={runs}{hold if number == at else ''}") for number in range(LINES)
        ]
        made = begin(doomed, lines)
        until("it is driven", lambda batch=made: driver(stack, batch.id))
        if driver(stack, made.id) == doomed.process.pid:
            break
        client(doomed).batches.cancel(made.id)  # another gateway looked for batches just then
    else:
        pytest.fail("the call that makes a batch wakes its gateway")
    until("it is under way", lambda: runs.exists() and len(runs.read_text().splitlines()) > at)
    doomed.process.send_signal(signal.SIGKILL)
    doomed.process.wait()
    Gates(tmp_path / "gate-held").open(0, 1)
    done = ended(stack.second, made.id)
    assert done.status == "completed"
    assert done.request_counts.completed == LINES
    answers = lines_of(stack.second, done.output_file_id)
    assert Counter(line["custom_id"] for line in answers) == {f"id-{number}": 1 for number in range(LINES)}
    assert done.error_file_id is None
    # asked for twice, a line is one job
    assert Counter(runs.read_text().split()) == {str(number): 1 for number in range(LINES)}


def jobs_of(stack: Any, *, ended: bool) -> list[str]:
    """The ids of the model's jobs."""

    async def read() -> list[str]:
        log = open_log(stack.log_url)
        await log.open()
        try:
            return [job.public_id for job in await log.jobs(MODEL, ended=ended, count=1000)]
        finally:
            await log.close()

    return asyncio.run(read())


def response_line(custom_id: str, prompt: str) -> dict[str, Any]:
    body = {"model": MODEL, "input": prompt, "max_output_tokens": 2, "store": False}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/responses", "body": body}


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/responses"])
def test_a_batch_that_is_cancelled_after_its_gateway_died_leaves_no_job(
    stack: Any, tmp_path: Path, endpoint: str
) -> None:
    """The next gateway finds the cancellation before it has asked for a line, so it knows no job of any."""
    until("no job is under way", lambda: not jobs_of(stack, ended=False))
    before = set(jobs_of(stack, ended=True))
    is_chat = endpoint == "/v1/chat/completions"
    gates = Gates(tmp_path / "gate")
    doomed = stack.gateway(f"doomed-{'chat' if is_chat else 'response'}")
    lines = [
        chat_line(f"id-{number}", f"prompt {number} gates={gates.prefix}", n=2)
        if is_chat
        else response_line(f"id-{number}", f"prompt {number} gates={gates.prefix}")
        for number in range(8)
    ]
    for _ in range(50):
        made = begin(doomed, lines, endpoint)
        until("it is driven", lambda batch=made: driver(stack, batch.id))
        if driver(stack, made.id) == doomed.process.pid:
            break
        client(doomed).batches.cancel(made.id)  # another gateway looked for batches just then
        ended(doomed, made.id)
    else:
        pytest.fail("the call that makes a batch wakes its gateway")
    until("all lines are jobs", lambda: len(jobs_of(stack, ended=False)) == (16 if is_chat else 8))
    doomed.process.send_signal(signal.SIGKILL)
    doomed.process.wait()
    assert client(stack.second).batches.cancel(made.id).status == "cancelling"
    done = ended(stack.second, made.id)
    assert done.status == "cancelled"
    assert len(lines_of(stack.second, done.error_file_id)) == 8
    assert jobs_of(stack, ended=False) == []
    if not is_chat:  # they were not to be stored
        assert set(jobs_of(stack, ended=True)) <= before
