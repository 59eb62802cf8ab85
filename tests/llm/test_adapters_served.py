"""Adapters of a real model through the OpenAI API: chosen by name, loaded and unloaded while texts are generated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import openai
import pytest
from e2e_server import Server, serving
from lora_files import write_adapter

NAME = "smollm2"
LIMIT_S = 300


@pytest.fixture(scope="module")
def server(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The model with one adapter; a second one lies beside its version."""
    directory = tmp_path_factory.mktemp("adapters")
    version = directory / "models" / NAME / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(f'name: "{NAME}"\nbackend: "llm"\n')
    for file in Path(model.directory).iterdir():
        (version / file.name).symlink_to(file)
    write_adapter(version / "adapters" / "one", 1)
    write_adapter(version.parent / "lora" / "two", 2)
    write_adapter(version.parent / "lora" / "large", 3, rank=32)
    flags = ("--openai-on-http-port=true", "--model-control-mode=explicit", f"--load-model={NAME}")
    with serving(directory / "models", directory / "state", *flags) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def say(client: Any, model: str, **more: Any) -> Any:
    messages = [{"role": "user", "content": "Tell me about rain."}]
    return client.chat.completions.create(
        model=model, messages=messages, temperature=0, extra_body={"ignore_eos": True}, **{"max_tokens": 12, **more}
    )


def text(client: Any, model: str) -> str:
    return str(say(client, model).choices[0].message.content)


def names(client: Any) -> dict[str, str | None]:
    return {one.id: one.parent for one in client.models.list()}


def change(server: Server, what: str, **body: Any) -> tuple[int, str]:
    """Status and body of the reply, which comes once the model was loaded again."""
    where = f"http://{server.http}/v1/{what}_lora_adapter"
    try:
        with urlopen(where, json.dumps(body).encode(), timeout=LIMIT_S) as reply:
            return reply.status, reply.read().decode()
    except HTTPError as refused:
        return refused.code, refused.read().decode()


def test_adapters_come_and_go_while_texts_are_generated(server: Server, client: Any) -> None:
    assert names(client) == {NAME: None, f"{NAME}:one": NAME}
    plain, one = text(client, NAME), text(client, f"{NAME}:one")
    assert plain != one

    stream = say(client, NAME, max_tokens=48, stream=True)
    parts = [next(stream)]
    assert change(server, "load", lora_name="two", lora_path="../lora/two") == (
        200,
        "Success: LoRA adapter 'two' added successfully.",
    )
    parts += stream
    told = "".join(part.choices[0].delta.content or "" for part in parts)
    assert told.startswith(plain)

    assert names(client) == {NAME: None, f"{NAME}:one": NAME, f"{NAME}:two": NAME}
    two = text(client, "two")
    assert two not in (plain, one)
    assert (text(client, NAME), text(client, f"{NAME}:one"), text(client, f"{NAME}:two")) == (plain, one, two)

    status, answer = change(server, "load", lora_name=f"{NAME}:two", lora_path="../lora/two")
    assert (status, "already been loaded" in answer) == (400, True)
    assert change(server, "unload", lora_name="one")[0] == 200
    assert names(client) == {NAME: None, f"{NAME}:two": NAME}
    with pytest.raises(openai.NotFoundError):
        text(client, f"{NAME}:one")
    assert text(client, f"{NAME}:two") == two
    assert change(server, "unload", lora_name="one")[0] == 404


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("../../elsewhere", "outside the model's directory"),
        ("../lora/none", "cannot read adapter_config.json"),
        ("../lora/large", "its rank is 32, slots hold 16"),
    ],
)
def test_an_adapter_that_does_not_fit_changes_nothing(server: Server, client: Any, path: str, reason: str) -> None:
    before = names(client)
    status, answer = change(server, "load", lora_name="bad", lora_path=path)
    assert status in (400, 500)
    assert reason in answer
    assert names(client) == before
    assert text(client, NAME)
