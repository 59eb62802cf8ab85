"""Adapters that are loaded and unloaded at run time: what is asked of the repository, and what is refused."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from charonia.catalog.served import ServedVersion
from charonia.models.config_forms import from_json
from gateway.openai.adapter_routes import changed
from gateway.openai.openai_application import OpenAiInterface
from gateway.openai.text_models import TextModel
from protos.model_config_pb2 import ModelConfig

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def asked(handler: Any) -> dict[str, str]:
    """The parameters of the configuration that the last load asked for."""
    name, config, files = handler.loads[-1]
    assert (name, files) == ("says", {})
    return {key: one.string_value for key, one in from_json(config).parameters.items()}


@pytest.fixture
def handler(handler: Any) -> Any:
    handler.models["says"] = replace(handler.models["says"], backend="llm")
    return handler


async def test_a_model_is_loaded_again_with_one_more(client: httpx2.AsyncClient, handler: Any) -> None:
    reply = await client.post(LOAD, json={"lora_name": "green", "lora_path": "../green"})
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'green' added successfully.")
    assert json.loads(asked(handler)["charonia.adapter_changes"]) == {"green": "../green"}
    assert json.loads(asked(handler)["charonia.adapters"]) == ["red", "blue", "green"]


@pytest.mark.parametrize(
    "given", [{"lora_name": "red"}, {"lora_name": "says:red"}, {"lora_name": "red", "model": "says"}]
)
async def test_or_without_one(client: httpx2.AsyncClient, handler: Any, given: dict[str, str]) -> None:
    reply = await client.post(UNLOAD, json=given)
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'red' removed successfully.")
    assert json.loads(asked(handler)["charonia.adapter_changes"]) == {"red": None}
    assert json.loads(asked(handler)["charonia.adapters"]) == ["blue"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (LOAD, {"lora_name": "red", "lora_path": "x"}, 400, "lora_name"),
        (LOAD, {"lora_name": "../x", "lora_path": "x"}, 400, "lora_name"),
        (LOAD, {"lora_name": "x" * 129, "lora_path": "x"}, 400, "lora_name"),
        (LOAD, {"lora_name": "x"}, 400, "lora_path"),
        (LOAD, {"lora_path": "x"}, 400, "lora_name"),
        (LOAD, {"lora_name": "x", "lora_path": "x", "model": "plain"}, 400, "model"),
        (LOAD, {"lora_name": "x", "lora_path": "x", "model": "none"}, 404, "model"),
        (UNLOAD, {"lora_name": "x"}, 404, "lora_name"),
    ],
)
async def test_refusals(
    client: httpx2.AsyncClient, handler: Any, path: str, body: dict[str, str], status: int, param: str
) -> None:
    reply = await client.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
    assert not handler.loads


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
async def test_a_server_that_loads_nothing_at_run_time(client: httpx2.AsyncClient, handler: Any, path: str) -> None:
    handler.control_mode = "none"
    reply = await client.post(path, json={"lora_name": "red", "lora_path": "x", "load_inplace": True})
    assert reply.status_code == 400
    assert "--model-control-mode=explicit" in reply.json()["error"]["message"]
    assert not handler.loads


async def test_one_may_be_replaced(client: httpx2.AsyncClient, handler: Any) -> None:
    reply = await client.post(LOAD, json={"lora_name": "red", "lora_path": "x", "load_inplace": True})
    assert reply.status_code == 200
    assert json.loads(asked(handler)["charonia.adapters"]) == ["blue", "red"]


async def test_a_change_goes_on_when_its_client_leaves(
    client: httpx2.AsyncClient, handler: Any, interface: OpenAiInterface
) -> None:
    """The next one waits for it, and is made to what it left."""
    begun, gate, load_model = asyncio.Event(), asyncio.Event(), handler.load_model

    async def slow(name: str, config: str, files: dict[str, bytes]) -> None:
        await load_model(name, config, files)
        begun.set()
        await gate.wait()
        names = from_json(config).parameters["charonia.adapters"].string_value
        old = handler.models[name]
        handler.models[name] = replace(old, parameters={**old.parameters, "charonia.adapters": names})

    handler.load_model = slow
    leaves = asyncio.create_task(client.post(LOAD, json={"lora_name": "green", "lora_path": "x"}))
    await begun.wait()
    leaves.cancel()
    await asyncio.wait([leaves])
    begun.clear()
    stays = asyncio.create_task(client.post(LOAD, json={"lora_name": "grey", "lora_path": "x"}))
    for _ in range(100):  # it has time to be wrong
        await asyncio.sleep(0)
    assert not begun.is_set()
    gate.set()
    assert (await stays).status_code == 200
    assert json.loads(asked(handler)["charonia.adapters"]) == ["red", "blue", "green", "grey"]
    gate.clear()
    begun.clear()
    ended = asyncio.create_task(client.post(UNLOAD, json={"lora_name": "grey"}))
    await begun.wait()
    await asyncio.wait_for(interface.close(), 60)
    assert (await ended).status_code == 503


def test_changes_add_up(handler: Any) -> None:
    """Of the configuration, what the executor writes itself is left out."""
    config = ModelConfig(name="says", max_batch_size=0)
    config.parameters["charonia.text_assets"].string_value = "digest"
    config.parameters["charonia.adapter_changes"].string_value = '{"one": "a", "two": null}'
    served = ServedVersion("says", 1, "", config, handler.models["says"], {}, {})
    found = from_json(changed(TextModel(served), "one", None)).parameters
    assert set(found) == {"charonia.adapter_changes", "charonia.adapters"}
    assert json.loads(found["charonia.adapter_changes"].string_value) == {"one": None, "two": None}
