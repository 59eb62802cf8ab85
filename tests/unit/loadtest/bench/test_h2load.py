"""The command line and the log of h2load."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.bench.cases import CASES
from loadtest.bench.h2load import Sample, command, parse_log, require
from loadtest.bench.messages import grpc_message, http_message
from loadtest.model import LoadTestError


def test_the_log_is_read_line_by_line() -> None:
    text = "1700000000000001\t200\t350\n1700000000000400\t503\t20\nhalf a li"
    assert parse_log(text) == [Sample(1700000000000001, 350, True), Sample(1700000000000400, 20, False)]


def test_grpc_shares_connections_and_http_has_one_for_each_request(tmp_path: Path) -> None:
    over_grpc = command("h2load", grpc_message(CASES["identity"]), "h:1", 64, (0.35, 1.0), tmp_path)
    assert [over_grpc[over_grpc.index(flag) + 1] for flag in ("-c", "-m", "-D")] == ["8", "8", "1000ms"]
    assert "--h1" not in over_grpc
    assert over_grpc[-1] == "http://h:1/inference.GRPCInferenceService/ModelInfer"
    over_http = command("h2load", http_message(CASES["mlp"], "v2bin"), "h:1", 64, (0.35, 1.0), tmp_path)
    assert [over_http[over_http.index(flag) + 1] for flag in ("-c", "-m")] == ["64", "1"]
    assert "--h1" in over_http
    assert over_http[-1] == "http://h:1/v2/models/mlp/infer"


def test_without_h2load_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LoadTestError, match="nghttp2-client"):
        require()
