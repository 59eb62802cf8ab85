"""`/docs`: the OpenAPI document as one HTML page without scripts or anything from elsewhere. Pure."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from typing import Any

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
summary{cursor:pointer;padding:.35rem .5rem;border-radius:4px}summary:hover{background:#f1f4f7}
details{margin:.2rem 0}details>div{padding:.2rem 0 1rem 1.5rem}
code,pre{font:13px/1.45 ui-monospace,monospace}pre{background:#f6f8fa;padding:.6rem;overflow:auto;max-height:24rem}
b.m{display:inline-block;width:4.5rem;font:600 12px ui-monospace,monospace}
table{border-collapse:collapse}td,th{text-align:left;vertical-align:top;padding:.15rem 1rem .15rem 0}
@media(prefers-color-scheme:dark){body{color:#d7dde3;background:#14181c}summary:hover,pre{background:#20262c}a{color:#7ab7ff}}
"""

POLICY = (
    "default-src 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    + "'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page's Content-Security-Policy: its own style, and nothing else."""


def render_page(document: dict[str, Any]) -> bytes:
    """The page, in UTF-8."""
    return "".join(_page(document)).encode()


def _page(document: dict[str, Any]) -> Iterator[str]:
    info = document["info"]
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Charonia: HTTP interface</title>'
    yield f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
    yield f"<h1>{escape(info['title'])}</h1>"
    for paragraph in info["description"].split("\n\n"):
        yield f"<p>{_text(paragraph)}</p>"
    yield '<p>For tools: <a href="openapi.json">openapi.json</a> (OpenAPI 3.1).</p>'
    for tag in document["tags"]:
        yield f"<h2>{escape(tag['name'])}</h2>"
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                if tag["name"] in operation["tags"]:
                    yield from _operation(document, path, method, operation)
    yield "<h2>schemas</h2>"
    for name, schema in document["components"]["schemas"].items():
        yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary><div>'
        yield f"{_code(schema)}</div></details>"
    yield "</body></html>"


def _operation(document: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f'<details id="{escape(operation["operationId"])}"><summary><b class="m">{method.upper()}</b>'
    yield f"<code>{escape(path)}</code> {_text(operation['summary'])}</summary><div>"
    if "description" in operation:
        yield f"<p>{_text(operation['description'])}</p>"
    if "parameters" in operation:
        yield "<h4>Parameters</h4><table>"
        for one in operation["parameters"]:
            yield f"<tr><td><code>{escape(one['name'])}</code><td>{one['in']}<td>{_text(one['description'])}"
        yield "</table>"
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<h4>Request: <code>{escape(media_type)}</code>{_named(content)}</h4>{_code(content['example'])}"
    yield "<h4>Responses</h4><table>"
    shown = []
    for status, response in operation["responses"].items():
        if "$ref" in response:
            response = document["components"]["responses"][response["$ref"].rpartition("/")[2]]
        elif "content" in response:
            shown.append((status, response["content"]))
        yield f"<tr><td>{status}<td>{_text(response['description'])}"
    yield "</table>"
    for status, contents in shown:
        for media_type, content in contents.items():
            yield f"<h4>{status}: <code>{escape(media_type)}</code>{_named(content)}</h4>{_code(content['example'])}"
    yield "</div></details>"


def _named(content: dict[str, Any]) -> str:
    name = content["schema"].get("$ref", "").rpartition("/")[2]
    return f' <a href="#{name}">{name}</a>' if name else ""


def _text(text: str) -> str:
    """Text in which backticks mean code."""
    return "".join(
        f"<code>{escape(part)}</code>" if at % 2 else escape(part) for at, part in enumerate(text.split("`"))
    )


def _code(value: Any) -> str:
    return f"<pre>{escape(value if isinstance(value, str) else json.dumps(value, indent=2))}</pre>"
