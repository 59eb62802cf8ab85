"""A whole server does what its OpenAPI document says: the short form of `make fuzz-openapi`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
from schema_fuzzing import RELOADED, fuzz, fuzzed_server

NEVER_DONE = (
    "POST /v2/cudasharedmemory/region/{region}/register",
    "POST /v2/systemsharedmemory/region/{region}/register",
    "POST /v2/cudasharedmemory/register",
    "POST /v2/systemsharedmemory/register",
    "GET /v2/cudasharedmemory/region/{region}/status",
    "GET /v2/systemsharedmemory/region/{region}/status",
    "POST /v2/repository/{repository}/models/{model}/load",
    "POST /v2/repository/{repository}/models/{model}/unload",
)
"""What is refused whatever is asked, or needs memory of a name that the client has made."""


def _check_job(server: Any, document: dict[str, Any], tail: str) -> None:
    """The example request as a job is answered as the document says: random requests are hardly ever accepted."""
    operation = document["paths"][f"/v2/models/{{model}}/{tail}"]["post"]
    example = operation["requestBody"]["content"]["application/json"]["example"]
    status, body = server.request(
        "POST", f"/v2/models/identity/{tail}", json.dumps(example).encode(), {"prefer": "respond-async"}
    )
    assert status == 202
    schema = operation["responses"]["202"]["content"]["application/json"]["schema"]
    jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]}).validate(json.loads(body))


def test_a_server_is_what_its_document_says(example_models: Path, tmp_path: Path) -> None:
    with fuzzed_server(example_models, tmp_path) as server:
        findings = fuzz(server.http, examples=5, seed=1, phases="examples,fuzzing")
        document = json.loads(server.get("/openapi.json")[1])
        for tail in ("infer", "generate", "generate_stream"):
            _check_job(server, document, tail)
        # the fuzzer's two workers load and unload a model all the time: the server is ready when that is over
        assert server.request("POST", f"/v2/repository/models/{RELOADED}/load")[0] == 200
        findings.statuses["GET /v2/health/ready"][server.get("/v2/health/ready")[0]] += 1
        log = server.log()
    assert findings.passed, findings.report
    assert "unexpected failure" not in log
    # every operation was asked, and done at least once where that is possible
    operations = {f"{m.upper()} {path}" for path, methods in document["paths"].items() for m in methods}
    assert set(findings.statuses) == operations - {"GET /openapi.json"}  # which it asked for first
    refused = {operation for operation, statuses in findings.statuses.items() if not statuses[200]}
    assert refused == set(NEVER_DONE)
