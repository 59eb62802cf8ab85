"""A tour of OpenAI's own client, blocking and not, through the API over the real model: unchanged calls, real texts."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import openai
import pytest
import scripted_texts
from e2e_server import Server, serving

MODEL = "smollm2"
LIMIT_S = 300
BATCH = Path(__file__).parents[2] / "examples" / "openai_batch.jsonl"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
GREEDY = {"model": MODEL, "messages": QUESTION, "temperature": 0, "seed": 7, "max_tokens": 24}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(model: Any, conversions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    embedding = tmp_path_factory.mktemp("embedding")
    scripted_texts.embedding(embedding, "embeds")
    flags = (
        f"--backend-config=llm,charonia.conversions={conversions}",
        f"--model-repository={embedding}",
        "--openai-on-http-port",
    )
    with serving(model.repository, tmp_path_factory.mktemp("state"), *flags) as running:
        yield running


class Asking:
    """One of OpenAI's two clients. A call is named as in its documentation: `chat.completions.create`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def do(self, call: str, *given: Any, **said: Any) -> Any:
        """What a call returns."""
        made = reduce(getattr, call.split("."), self._client)
        if inspect.iscoroutinefunction(made) or isinstance(self._client, openai.AsyncOpenAI):
            return await made(*given, **said)
        return await asyncio.to_thread(made, *given, **said)

    async def events(self, call: str, *given: Any, **said: Any) -> list[Any]:
        """All that a streamed call gives."""
        stream = await self.do(call, *given, stream=True, **said)
        if isinstance(self._client, openai.AsyncOpenAI):
            return [event async for event in stream]
        return await asyncio.to_thread(list, stream)

    async def until(self, call: str, given: str, states: tuple[str, ...]) -> Any:
        """Read an object until its status is one of these."""
        async with asyncio.timeout(LIMIT_S):
            while (found := await self.do(call, given)).status not in states:
                await asyncio.sleep(0.1)
        return found


@pytest.fixture(params=["blocking", "not blocking"])
async def asking(request: Any, server: Server) -> AsyncIterator[Asking]:
    said: dict[str, Any] = {"base_url": f"http://{server.http}/v1", "api_key": "none", "max_retries": 0}
    if request.param == "blocking":
        with openai.OpenAI(**said, timeout=LIMIT_S) as client:
            yield Asking(client)
        return
    async with openai.AsyncOpenAI(**said, timeout=LIMIT_S) as other:
        yield Asking(other)


async def test_models(asking: Asking) -> None:
    found = await asking.do("models.retrieve", MODEL)
    assert (found.id, found.object) == (MODEL, "model")
    assert found.max_model_len > 1000


async def test_a_chat_whole_and_streamed(asking: Asking) -> None:
    whole = await asking.do("chat.completions.create", **GREEDY, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    assert "Paris" in choice.message.content
    assert len(choice.logprobs.content) >= whole.usage.completion_tokens - 1  # the last may be the turn's end
    assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
    chunks = await asking.events("chat.completions.create", **GREEDY, stream_options={"include_usage": True})
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(parts) == choice.message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        choice.finish_reason
    ]
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


async def test_choices_seeds_and_stops(asking: Asking) -> None:
    said = {**GREEDY, "temperature": 1.0, "n": 3, "max_tokens": 12}
    first = [one.message.content for one in (await asking.do("chat.completions.create", **said)).choices]
    again = [one.message.content for one in (await asking.do("chat.completions.create", **said)).choices]
    assert first == again
    stopped = await asking.do("chat.completions.create", **GREEDY, stop=["Paris"])
    assert stopped.choices[0].finish_reason == "stop"
    assert "Paris" not in stopped.choices[0].message.content


async def test_structured_answers_and_tools(asking: Asking) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    said = {**GREEDY, "max_tokens": 100}
    answer = await asking.do("chat.completions.create", **said, response_format=form)
    assert answer.choices[0].finish_reason == "stop"
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "age"}
    tools = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("find", "go")]
    named = {"type": "function", "function": {"name": "go"}}
    made = await asking.do("chat.completions.create", **said, tools=tools, tool_choice=named)
    (call,) = made.choices[0].message.tool_calls
    assert call.function.name == "go"
    assert set(json.loads(call.function.arguments)) == {"city"}
    chunks = await asking.events("chat.completions.create", **said, tools=tools, tool_choice=named)
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments
    required = await asking.do(
        "chat.completions.create", **said, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    assert required.choices[0].finish_reason == "tool_calls"
    assert required.choices[0].message.tool_calls[0].function.name in ("find", "go")


async def test_completions(asking: Asking) -> None:
    said = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    prompts = ["The capital of France is", "Once upon a time"]
    both = await asking.do("completions.create", **said, prompt=prompts)
    assert [one.index for one in both.choices] == [0, 1]
    assert "Paris" in both.choices[0].text
    events = await asking.events("completions.create", **said, prompt=prompts[0])
    assert "".join(event.choices[0].text for event in events) == both.choices[0].text
    scored = await asking.do("completions.create", model=MODEL, prompt=prompts[0], echo=True, logprobs=1, max_tokens=0)
    assert scored.choices[0].text == prompts[0]
    assert scored.choices[0].logprobs.token_logprobs[0] is None


async def test_responses(asking: Asking) -> None:
    said = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}
    question = QUESTION[0]["content"]
    made = await asking.do("responses.create", **said, input=question)
    assert "Paris" in made.output_text
    assert (await asking.do("responses.retrieve", made.id)).output_text == made.output_text
    events = await asking.events("responses.create", **said, input=question)
    assert events[0].type == "response.created"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == made.output_text
    place = events[len(events) // 2].sequence_number
    rest = await asking.events("responses.retrieve", events[0].response.id, starting_after=place)
    assert [event.model_dump() for event in rest] == [event.model_dump() for event in events[place + 1 :]]
    more = await asking.do("responses.create", **said, input="And of Italy?", previous_response_id=made.id)
    items = (await asking.do("responses.input_items.list", more.id, order="asc")).data
    assert [item.content[0].text for item in items] == [question, made.output_text, "And of Italy?"]
    for one in (made.id, more.id):
        await asking.do("responses.delete", one)
        with pytest.raises(openai.NotFoundError):
            await asking.do("responses.retrieve", one)


async def test_background_responses(asking: Asking) -> None:
    said = {"model": MODEL, "input": QUESTION[0]["content"], "background": True, "temperature": 0}
    made = await asking.do("responses.create", **said, max_output_tokens=16)
    done = await asking.until("responses.retrieve", made.id, ("completed", "incomplete"))
    assert "Paris" in done.output_text
    long = await asking.do("responses.create", **{**said, "input": "Write a long story."}, max_output_tokens=1500)
    await asking.until("responses.retrieve", long.id, ("in_progress", "completed", "incomplete"))
    assert (await asking.do("responses.cancel", long.id)).status == "cancelled"


async def test_files_and_batches(asking: Asking) -> None:
    content = BATCH.read_bytes()
    file = await asking.do("files.create", file=("batch.jsonl", content), purpose="batch")
    assert (await asking.do("files.content", file.id)).content == content
    made = await asking.do(
        "batches.create", input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    done = await asking.until("batches.retrieve", made.id, ("completed", "failed", "expired", "cancelled"))
    assert done.status == "completed"
    wanted = sorted(json.loads(line)["custom_id"] for line in content.splitlines() if line)
    lines = (await asking.do("files.content", done.output_file_id)).content.splitlines()
    answers = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, lines)}
    assert sorted(answers) == wanted
    assert len(lines) == len(wanted)
    assert all(body["choices"][0]["message"]["content"] for body in answers.values())
    assert (await asking.do("files.delete", file.id)).deleted


async def test_embeddings(asking: Asking) -> None:
    found = await asking.do("embeddings.create", model="embeds", input=["abc", "hh"])
    assert found.data[1].embedding == [0, 0, 0, 0, 0, 0, 0, 1]
    assert found.data[0].embedding[:3] == pytest.approx([3**-0.5] * 3)


async def test_refusals(asking: Asking) -> None:
    for said, code in (
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, "context_length_exceeded"),
        ({"extra_body": {"max_token": 3}}, "unknown_parameter"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await asking.do("chat.completions.create", **{**GREEDY, **said})
        assert refused.value.code == code
    with pytest.raises(openai.NotFoundError):
        await asking.do("chat.completions.create", **{**GREEDY, "model": "none"})
