"""Writes the HTTP interface from the server's own OpenAPI document: a page for each tag, and one of the schemas.

The document is the one that a server gives at `/openapi.json` (`gateway/http/openapi`), with the OpenAI API. Plain
pages, so that the site's search finds them and nothing has to be loaded from elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from docs_site.pages import tree
from gateway.http.openapi.document import build_document
from gateway.http.openapi.stored_operations import STORED_OPERATIONS, stored_schemas
from gateway.http.openapi.text_operations import TEXT_OPERATIONS, text_schemas

FOLDER = "reference/http"
TITLES = {
    "health": "Health",
    "metadata": "Metadata",
    "model-config": "Model configuration",
    "statistics": "Statistics",
    "inference": "Inference",
    "jobs": "Jobs",
    "model-repository": "Model repository",
    "logging": "Logging",
    "trace": "Tracing",
    "shared-memory": "Shared memory",
    "openai": "OpenAI API",
    "documentation": "Documentation",
}
_SCHEMA = "#/components/schemas/"


def whole_document() -> dict[str, Any]:
    """The document of a server that has every interface on its HTTP port."""
    operations = (*TEXT_OPERATIONS, *STORED_OPERATIONS)
    return build_document(version("charonia"), operations, {**text_schemas(), **stored_schemas()})


def write(target: Path) -> None:
    """Writes the pages and the document itself below `target`."""
    document = whole_document()
    folder = target / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in http_pages(document).items():
        (folder / name).write_text(text)
    (folder / "openapi.json").write_text(json.dumps(document, indent=1))


def http_pages(document: dict[str, Any]) -> dict[str, str]:
    """Texts by file name. Raises KeyError for a tag that has no title here."""
    tags = [tag["name"] for tag in document["tags"]]
    made = {"index.md": _index(document, tags), "schemas.md": _schemas(document)}
    for tag in tags:
        lines = [f"# {TITLES[tag]}", ""]
        for path, method, operation in _operations(document, tag):
            lines += _operation(document, path, method, operation)
        made[f"{tag}.md"] = "\n".join(lines) + "\n"
    return made


def _operations(document: dict[str, Any], tag: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if tag in operation["tags"]:
                yield path, method, operation


def _index(document: dict[str, Any], tags: list[str]) -> str:
    lines = ["# HTTP interface", "", prose(document["info"]["description"]), ""]
    lines += ["The same as a document for tools, OpenAPI 3.1: [openapi.json](openapi.json). A server gives its own at"]
    lines += ["`/openapi.json`, and a page about it at `/docs`.", ""]
    for tag in tags:
        lines += [f"## {TITLES[tag]}", "", "| operation | what |", "|---|---|"]
        for path, method, operation in _operations(document, tag):
            name = f"[`{method.upper()} {path}`]({tag}.md#{_anchor(operation)})"
            lines.append(f"| {name} | {_cell(operation['summary'])} |")
        lines.append("")
    pages = [f"{FOLDER}/{tag}.md" for tag in tags]
    return "\n".join([*lines, tree("", [*pages, f"{FOLDER}/schemas.md"], f"{FOLDER}/index.md")])


def _anchor(operation: dict[str, Any]) -> str:
    return f"operation-{operation['operationId'].lower()}"


def _schema_anchor(name: str) -> str:
    return f"schema-{name.lower().replace('.', '-')}"


def _operation(document: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> Iterator[str]:
    yield from (f"({_anchor(operation)})=", f"## {operation['summary']}", "")
    yield from (f"**{method.upper()}** `{path}`", "")
    if "description" in operation:
        yield from (prose(operation["description"]), "")
    if parameters := operation.get("parameters"):
        yield from ("| parameter | in | type | what |", "|---|---|---|---|")
        for one in parameters:
            kind = _cell(_kind(one["schema"]))
            yield f"| `{one['name']}` | {one['in']} | {kind} | {_cell(one['description'])} |"
        yield ""
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        yield from _example(f"Request, `{media_type}`{_named(content)}:", content)
    shown = []
    yield from ("| status | what |", "|---|---|")
    for status, response in operation["responses"].items():
        if "$ref" in response:
            response = document["components"]["responses"][response["$ref"].rpartition("/")[2]]
        elif "content" in response:
            shown.append((status, response["content"]))
        yield f"| {status} | {_cell(response['description'])} |"
    yield ""
    for status, contents in shown:
        for media_type, content in contents.items():
            yield from _example(f"Response {status}, `{media_type}`{_named(content)}:", content)


def _named(content: dict[str, Any]) -> str:
    name = content["schema"].get("$ref", "").removeprefix(_SCHEMA)
    return f" ([{name}](schemas.md#{_schema_anchor(name)}))" if name else ""


def _example(about: str, content: dict[str, Any]) -> Iterator[str]:
    example = content["example"]
    is_text = isinstance(example, str)
    lines = (example if is_text else _json(example)).splitlines()
    yield from (about, "", "```text" if is_text else "```json", *lines, "```", "")


def _json(value: Any) -> str:
    """JSON with members on lines of their own, and lists of plain values on one."""
    plain: list[str] = []

    def kept(one: Any) -> Any:
        if isinstance(one, dict):
            return {name: kept(member) for name, member in one.items()}
        if isinstance(one, list) and any(isinstance(member, dict | list) for member in one):
            return [kept(member) for member in one]
        if isinstance(one, list):
            plain.append(json.dumps(one, ensure_ascii=False))
            return f"\0{len(plain) - 1}\0"
        return one

    text = json.dumps(kept(value), indent=2, ensure_ascii=False)
    return re.sub(r'"\\u0000(\d+)\\u0000"', lambda found: plain[int(found[1])], text)


def _schemas(document: dict[str, Any]) -> str:
    lines = ["# Schemas", "", "The bodies of requests and responses. Members in bold are required.", ""]
    for name, schema in document["components"]["schemas"].items():
        lines += [f"({_schema_anchor(name)})=", f"## {name}", ""]
        if "description" in schema:
            lines += [_sentence(prose(schema["description"])), ""]
        if "properties" not in schema:
            lines += [_kind(schema, "") or "any value", ""]
            continue
        required = schema.get("required", [])
        lines += ["| member | type | what |", "|---|---|---|"]
        for member, one in schema["properties"].items():
            shown = f"**`{member}`**" if member in required else f"`{member}`"
            lines.append(f"| {shown} | {_cell(_kind(one, ''))} | {_cell(one.get('description', ''))} |")
            lines += _inner_rows(member, one)
        lines.append("")
    return "\n".join(lines)


def _inner_rows(outer: str, schema: dict[str, Any]) -> Iterator[str]:
    """Rows for the members of an object, or of the objects of a list, that has no name of its own."""
    inner = schema.get("items", {}) if schema.get("type") == "array" else schema
    for member, one in inner.get("properties", {}).items():
        name = f"{outer}.{member}"
        yield f"| `{name}` | {_cell(_kind(one, ''))} | {_cell(one.get('description', ''))} |"
        yield from _inner_rows(name, one)


def _kind(schema: dict[str, Any], page: str = "schemas.md") -> str:
    """The type in words, with links to the schemas on `page`."""
    if "$ref" in schema:
        name, *within = schema["$ref"].removeprefix(_SCHEMA).split("/")
        shown = ".".join([name, *within[1::2]])  # Job/properties/state is shown as Job.state
        return f"[{shown}]({page}#{_schema_anchor(name)})"
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return " or ".join(dict.fromkeys(_kind(one, page) for one in schema[word]))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    kinds = schema.get("type", "")
    if kinds == "array":
        return f"list of {_kind(schema.get('items', {}), page) or 'values'}"
    if kinds == "object" and isinstance(schema.get("additionalProperties"), dict) and "properties" not in schema:
        return f"object of {_kind(schema['additionalProperties'], page) or 'values'}"
    return " or ".join(kinds) if isinstance(kinds, list) else kinds


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _cell(text: str) -> str:
    return prose(text).replace("|", "\\|").replace("\n", " ")


def prose(text: str) -> str:
    """Text in which backticks mean code and nothing else means markup."""
    parts = text.split("`")
    return "`".join(re.sub(r"([<*$])", r"\\\1", part) if at % 2 == 0 else part for at, part in enumerate(parts))
