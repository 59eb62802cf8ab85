"""The OpenAI API of a whole server, asked by OpenAI's own client: blocking and not, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import scripted_texts
from e2e_asking import on_the_page, until
from e2e_server import Server, serving

LIMIT_S = 60
FLAGS = ("--allow-openai", "--openai-port=0", "--openai-address=127.0.0.1", "--openai-on-http-port")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("find", "go")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("openai")
    models = directory / "models"
    blob = scripted_texts.model(models, "says", adapters="red,blue")
    scripted_texts.model(models, "plain", with_assets=False)
    scripted_texts.embedding(models, "embeds")
    with serving(models, directory / "state", *FLAGS) as server:
        server.log_client().set(f"blob:{scripted_texts.digest_of(blob)}", blob)
        yield server


def own_port(server: Server) -> str:
    where = json.loads((server.state_dir / "endpoints.json").read_text())
    return str(where["openai"])


@pytest.fixture(params=["own port", "HTTP port"])
def client(request: Any, server: Server) -> Iterator[Any]:
    where = own_port(server) if request.param == "own port" else server.http
    with openai.OpenAI(base_url=f"http://{where}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=f"http://{own_port(server)}/v1", api_key="none", max_retries=0) as client:
        yield client


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_models(client: Any) -> None:
    found = {model.id: model.parent for model in client.models.list()}
    assert found == {"embeds": None, "plain": None, "says": None, "says:blue": "says", "says:red": "says"}
    assert client.models.retrieve("says:red").max_model_len == scripted_texts.CONTEXT


def test_a_chat_whole_and_streamed(client: Any) -> None:
    whole = client.chat.completions.create(model="says", messages=user("say grüße an alle."), logprobs=True, seed=1)
    assert whole.choices[0].message.content == "grüße an alle"
    assert bytes(b for one in whole.choices[0].logprobs.content for b in one.bytes).decode() == "grüße an alle"
    stream = client.chat.completions.create(
        model="says", messages=user("say grüße an alle."), stream=True, stream_options={"include_usage": True}
    )
    chunks = [*stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "grüße an alle"
    assert [c.choices[0].finish_reason for c in chunks[:-1]].count("stop") == 1
    assert chunks[-1].usage == whole.usage
    assert whole._request_id


def test_completions_tools_and_formats(client: Any) -> None:
    found = client.completions.create(model="says:red", prompt=["say a.", "say b."], max_tokens=9)
    assert [choice.text for choice in found.choices] == ["red:a", "red:b"]
    named = {"type": "function", "function": {"name": "go"}}
    for choice, name in (("required", "find"), (named, "go")):
        answer = client.chat.completions.create(
            model="says", messages=user("where"), tools=TOOLS, tool_choice=choice, max_tokens=200
        )
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (name, {"city": "Paris"})
    form = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
    answer = client.chat.completions.create(model="says", messages=user("where"), response_format=form, max_tokens=99)
    assert json.loads(answer.choices[0].message.content) == {"city": "Paris"}


def test_embeddings(client: Any) -> None:
    found = client.embeddings.create(model="embeds", input=["abc", "hh"])
    assert found.data[1].embedding == [0, 0, 0, 0, 0, 0, 0, 1]
    assert found.data[0].embedding[:3] == pytest.approx([3**-0.5] * 3)


def test_errors(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nothing", messages=user("x"))
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="says", messages=user("x" * 5000))
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="says", messages=user("x"), n=10**9)
    assert wrong.value.param == "n"
    stream = client.chat.completions.create(model="says", messages=user("fail later"), stream=True, max_tokens=9)
    with pytest.raises(openai.APIError, match="the model failed"):
        list(stream)


async def test_many_streams_at_once(async_client: Any) -> None:
    async def one(number: int) -> str:
        stream = await async_client.chat.completions.create(
            model="says", messages=user(f"say text {number}."), stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert await asyncio.gather(*map(one, range(16))) == [f"text {number}" for number in range(16)]


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Where the model waits for files; that of its first character is there."""
    (tmp_path / "gate.0").touch()
    return tmp_path / "gate"


async def test_a_client_that_leaves_ends_its_request(server: Server, async_client: Any, gate: Path) -> None:
    stream = await async_client.chat.completions.create(
        model="says", messages=user(f"gate={gate} say abc."), stream=True
    )
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    until("the model to see the cancellation", Path(f"{gate}.left").exists)
    counted = 'charonia_openai_requests_total{endpoint="chat",model="says",outcome="cancelled"} 1'
    until("the call to be counted", lambda: counted in server.scrape())


def test_metrics(server: Server, client: Any) -> None:
    client.chat.completions.create(model="plain", messages=user("say abc."))
    tokens = 'charonia_openai_tokens_total{kind="prompt",model="plain",tenant=""}'
    on_the_page(server, tokens, 'charonia_openai_time_to_first_token_seconds_bucket{le="+Inf",model="plain"}')

    def own() -> str:
        with urllib.request.urlopen(f"http://{own_port(server)}/metrics", timeout=LIMIT_S) as reply:
            return str(reply.read().decode())

    for family in ("nv_cpu_utilization", "charonia_executor_executions_total"):
        until(f"{family} on the page", lambda family=family: family in own())
