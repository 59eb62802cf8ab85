from __future__ import annotations

import pytest

from gateway.http.codec.paths import GENERATE_STREAM, INFER, LIVE, MODEL_READY, READY, group_of, resolve


@pytest.mark.parametrize(
    ("path", "kind", "model", "version"),
    [
        ("/v2/models/m/infer", INFER, "m", ""),
        ("/v2/models/m n:ü/versions/007/infer", INFER, "m n:ü", "007"),
        ("/v2/models/versions/infer", INFER, "versions", ""),
        ("/v2/models/m/ready", MODEL_READY, "m", ""),
        ("/v2/models/m/versions/2/ready", MODEL_READY, "m", "2"),
        ("/v2/models/m/generate_stream", GENERATE_STREAM, "m", ""),
        ("/v2/health/live", LIVE, "", ""),
        ("/v2/health/ready", READY, "", ""),
    ],
)
def test_fast_paths(path: str, kind: str, model: str, version: str) -> None:
    route = resolve(path)
    assert route is not None
    assert (route.kind, route.model, route.version) == (kind, model, version)


@pytest.mark.parametrize(
    "path",
    ["/v2/models/a/b/infer", "/v2/models//infer", "/v2/models/m/versions/abc/infer", "/v2/models/m/versions//infer",
     "/v2/models/m", "/v2/models/m/infer/", "/v2/models/m/versions/-1/infer", "/v1/models/m/infer", "/v2/health/",
     "/v2/models/m/versions/\u0661/infer"],
)  # fmt: skip
def test_everything_else_is_left_to_fastapi(path: str) -> None:
    assert resolve(path) is None


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("/v2", "metadata"), ("/v2/models/m", "metadata"), ("/v2/models/m/versions/1", "metadata"),
        ("/v2/models/stats", "statistics"), ("/v2/models/m/stats", "statistics"),
        ("/v2/models/m/versions/1/stats", "statistics"), ("/v2/models/m/config", "model-config"),
        ("/v2/repository/index", "model-repository"), ("/v2/repository/models/m/load", "model-repository"),
        ("/v2/systemsharedmemory/status", "shared-memory"), ("/v2/cudasharedmemory/unregister", "shared-memory"),
        ("/v2/trace/setting", "trace"), ("/v2/models/m/trace/setting", "trace"), ("/v2/logging", "logging"),
        ("/docs", ""), ("/v2/other", ""),
    ],
)  # fmt: skip
def test_groups(path: str, group: str) -> None:
    assert group_of(path) == group_of(f"{path}\n") == group
