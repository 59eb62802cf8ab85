"""The OpenAPI document has the operations of the OpenAI API where it is on, and answers are what it says."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import jsonschema_rs

from gateway.http.openapi.document import build_document
from gateway.http.openapi.task_operations import OPENAI_OPERATIONS, openai_schemas
from gateway.openai.model_routes import OWN_PATHS
from gateway.openai.openai_application import OpenAiInterface

DOCUMENT = build_document("1.2.3", OPENAI_OPERATIONS, openai_schemas())


def check(schema: str, value: Any) -> None:
    where = {"$ref": f"#/components/schemas/{schema}", "components": DOCUMENT["components"]}
    jsonschema_rs.Draft202012Validator(where).validate(value)


def test_every_path_is_in_the_document(interface: OpenAiInterface) -> None:
    routes = {(route.path, route.method.lower()) for route in interface.routes.routes}
    documented = {(one.path, one.method) for one in OPENAI_OPERATIONS}
    assert documented == {(path, method) for path, method in routes if path not in OWN_PATHS}


def test_references_lead_somewhere_and_examples_fit() -> None:
    text = json.dumps(DOCUMENT)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "#/')[1:]}:
        part: Any = DOCUMENT
        for name in reference.split("/"):
            part = part[name]
    for one in OPENAI_OPERATIONS:
        for content in (*one.bodies, *(content for reply in one.replies.values() for content in reply.contents)):
            schema = {**content.schema, "components": DOCUMENT["components"]}
            jsonschema_rs.Draft202012Validator(schema).validate(content.example)
    check(
        "OpenAiError", DOCUMENT["components"]["responses"]["OpenAiError404"]["content"]["application/json"]["example"]
    )


async def test_answers_are_what_the_document_says(client: httpx2.AsyncClient) -> None:
    messages = [{"role": "user", "content": "say hi."}]
    body = {"model": "says", "messages": messages, "logprobs": True, "n": 2}
    check("ChatCompletionRequest", body)
    check("ChatCompletion", (await client.post("/v1/chat/completions", json=body)).json())
    body = {"model": "says", "prompt": ["say hi.", "x"], "logprobs": 1}
    check("TextCompletionRequest", body)
    check("TextCompletion", (await client.post("/v1/completions", json=body)).json())
    check("Embeddings", (await client.post("/v1/embeddings", json={"model": "embeds", "input": "x"})).json())
    check("OpenAiModels", (await client.get("/v1/models")).json())
    check("Tokens", (await client.post("/tokenize", json={"model": "says", "prompt": "x"})).json())
    check("OpenAiError", (await client.get("/v1/nothing")).json())
    own = (await client.get("/openapi.json")).json()
    assert set(own["paths"]) == {one.path for one in OPENAI_OPERATIONS}


def test_servers_without_this_api_have_nothing_of_it() -> None:
    plain = json.dumps(build_document("1.2.3"))
    assert "OpenAi" not in plain
    assert "Error409" not in plain
