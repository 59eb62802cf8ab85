"""The OpenAPI document says what the server has: its routes, and examples that are what their schemas say."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema_rs
import pytest
from starlette.routing import Route

from charonia.errors import DEADLINE_EXCEEDED
from charonia.options.settings import GatewaySettings
from gateway.http.codec.paths import resolve
from gateway.http.openapi.document import build_document
from gateway.http.openapi.operations import PATH_PARAMETERS
from gateway.http.routes import control_app

DOCUMENT = build_document("1.2.3")
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]
_PLACE = re.compile(r"\{(\w+)\}")


def _filled(path: str) -> str:
    """The path with the examples of its parameters."""
    return _PLACE.sub(lambda found: str(PATH_PARAMETERS[found[1]].example), path)


def _of_fast_path(path: str) -> set[tuple[str, str]]:
    found = resolve(_filled(path))
    return {(path, found.method.lower())} if found is not None else set()


def test_every_route_is_in_the_document_and_no_other(settings: GatewaySettings, handler: Any) -> None:
    app: Any = control_app(settings, handler)
    routes = {(r.path, m.lower()) for r in app.routes if isinstance(r, Route) for m in r.methods or ()}
    models = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
    tails = ("/infer", "/generate", "/generate_stream", "/ready")
    fast = {one for path in ("/v2/health/live", "/v2/health/ready") for one in _of_fast_path(path)}
    fast |= {one for model in models for tail in tails for one in _of_fast_path(model + tail)}
    assert len(fast) == 10
    assert set(OPERATIONS) == routes | fast


def test_the_fast_path_answers_nothing_that_is_not_listed() -> None:
    known = {"live", "ready", "model_ready", "infer", "generate", "generate_stream"}
    found = [resolve(_filled(path)) for path, _ in OPERATIONS]
    assert {route.kind for route in found if route is not None} == known


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
async def test_another_method_is_refused_with_those_that_are_allowed(
    client: httpx2.AsyncClient, path: str, method: str
) -> None:
    reply = await client.request("PATCH", _filled(path))
    assert (reply.status_code, reply.headers["content-type"]) == (405, "text/plain")
    assert {word.lower() for word in reply.headers["allow"].split(", ")} == set(DOCUMENT["paths"][path])


def _contents(part: Any, at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """What has a schema and an example, with its place in the document."""
    if isinstance(part, dict):
        if "schema" in part and "example" in part:
            yield at, part
        for name, one in part.items():
            if name not in ("schemas", "example"):
                yield from _contents(one, f"{at}/{name}")
    elif isinstance(part, list):
        for number, one in enumerate(part):
            yield from _contents(one, f"{at}/{number}")


CONTENTS = dict(_contents(DOCUMENT))


def _validator(schema: dict[str, Any]) -> Any:
    return jsonschema_rs.Draft202012Validator({**schema, "components": DOCUMENT["components"]})


@pytest.mark.parametrize("place", CONTENTS)
def test_an_example_is_what_its_schema_says(place: str) -> None:
    _validator(CONTENTS[place]["schema"]).validate(CONTENTS[place]["example"])


def test_every_body_has_an_example() -> None:
    bodies = [
        content
        for path, method in OPERATIONS
        for part in (
            *DOCUMENT["paths"][path][method]["responses"].values(),
            DOCUMENT["paths"][path][method].get("requestBody", {}),
        )
        for content in part.get("content", {}).values()
    ]
    assert len(bodies) > 50
    assert all("example" in content and "schema" in content for content in bodies)


def test_a_schema_refuses_what_it_does_not_say() -> None:
    wrong = {**CONTENTS["/paths//v2/get/responses/200/content/application/json"]["example"], "more": 1}
    with pytest.raises(jsonschema_rs.ValidationError):
        _validator({"$ref": "#/components/schemas/ServerMetadata"}).validate(wrong)


def test_references_and_ids_lead_somewhere() -> None:
    text = json.dumps(DOCUMENT)
    for reference in set(re.findall(r'"\$ref": "#/([^"]+)"', text)):
        part: Any = DOCUMENT
        for name in reference.split("/"):
            part = part[name]
    ids = [DOCUMENT["paths"][path][method]["operationId"] for path, method in OPERATIONS]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'"operationId": "(\w+)"', text)) == set(ids)


async def test_the_document_is_served(client: httpx2.AsyncClient) -> None:
    reply = await client.get("/openapi.json")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
    assert reply.json()["paths"] == json.loads(json.dumps(DOCUMENT["paths"]))


class _Page(html.parser.HTMLParser):
    """The tags of a page and the addresses in it."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: set[str] = set()
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("href", "src", "action"):
                self.addresses.add(value or "")
            elif name == "id":
                self.ids.add(value or "")
            assert not name.startswith("on")
            assert name != "style"


async def test_the_page_needs_nothing_from_elsewhere(client: httpx2.AsyncClient) -> None:
    reply = await client.get("/docs")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    page = _Page()
    page.feed(reply.text)
    assert not page.tags & {"script", "iframe", "object", "img", "form", "base"}
    local = {address for address in page.addresses if address.startswith("#")}
    assert page.addresses - local == {"openapi.json"}
    assert {address[1:] for address in local} <= page.ids
    assert {DOCUMENT["paths"][path][method]["operationId"] for path, method in OPERATIONS} <= page.ids
    (style,) = re.findall(r"<style>(.*?)</style>", reply.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in reply.headers["content-security-policy"]
    assert reply.headers["content-security-policy"].startswith("default-src 'none';")


def test_the_example_of_a_passed_deadline_is_its_text() -> None:
    reply = json.dumps(DOCUMENT["components"]["responses"]["Error504"])
    assert DEADLINE_EXCEEDED in reply
    assert "Request timeout expired" not in reply, "that is the text of a queue's time-out, a 503"
