"""As whom a repository is asked (R7): the environment, or the entry of the credentials file with the longest key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from charonia.errors import StartupError
from executors.repository.remote.credentials import Credentials, choose
from executors.repository.remote.store import parse

FILE = "TRITON_CLOUD_CREDENTIAL_PATH"


def written(directory: Path, content: Any) -> dict[str, str]:
    path = directory / "credentials.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return {FILE: str(path)}


def test_the_longest_beginning_wins(tmp_path: Path) -> None:
    environ = written(
        tmp_path,
        {
            "s3": {
                "": {"key_id": "default"},
                "s3://a": {"key_id": "a"},
                "s3://a/b": {"key_id": "ab", "secret_key": "s", "region": "r", "session_token": "t"},
                "s3://https://host:9000/a": {"profile": "minio"},
            },
            "gs": {"": "/all.json", "gs://a": "/a.json"},
            "as": {"as://account": {"account_str": "account", "account_key": "k"}},
        },
    )

    def values(url: str) -> dict[str, str]:
        return dict(choose(parse(url), environ).values)

    assert values("s3://a/b/c") == {"key_id": "ab", "secret_key": "s", "region": "r", "session_token": "t"}
    assert values("s3://a/x") == values("s3://abc") == {"key_id": "a"}
    assert values("s3://b") == {"key_id": "default"}
    assert values("s3://https://host:9000/a/x") == {"profile": "minio"}
    assert values("gs://a/x") == {"file": "/a.json"}
    assert values("gs://b") == {"file": "/all.json"}
    assert values("as://account/container") == {"account_str": "account", "account_key": "k"}
    environ = written(tmp_path, {"s3": {"s3://a/": {"key_id": "slash"}, "": {}}})
    assert values("s3://a") == values("s3://a/") == values("s3://a/b") == {"key_id": "slash"}
    assert values("s3://ab") == {}
    environ = written(tmp_path, {"as": {"as://account": {}}})
    with pytest.raises(StartupError, match="no credentials for the model repository 'as://other/container'"):
        values("as://other/container")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text("ab/", max_size=5), unique=True), st.text("ab", min_size=1, max_size=6))
def test_any_set_of_keys(tmp_path: Path, keys: list[str], bucket: str) -> None:
    url = f"s3://{bucket}"
    keys = [f"s3://{key}" for key in keys] + [""]
    environ = written(tmp_path, {"s3": {key: {"key_id": key} for key in keys}})
    chosen = choose(parse(url), environ)["key_id"]
    assert f"{url}/".startswith(chosen)
    assert not [key for key in keys if f"{url}/".startswith(key) and len(key) > len(chosen)]


def test_the_file_is_all_that_counts(tmp_path: Path) -> None:
    environ = {
        **written(tmp_path, {"as": {"": {"account_str": "file", "account_key": "k"}}}),
        "AZURE_STORAGE_ACCOUNT": "environment",
        "AZURE_STORAGE_AUTH_TYPE": "default",
    }
    chosen = choose(parse("as://a/c"), environ)
    assert chosen["account_str"] == "file"
    assert chosen["auth_type"] == ""


def test_the_environment() -> None:
    environ = {
        "AZURE_STORAGE_ACCOUNT": "account",
        "AZURE_STORAGE_KEY": "key",
        "AZURE_STORAGE_AUTH_TYPE": "managed_identity",
        "AZURE_STORAGE_CLIENT_ID": "client",
        "AWS_SECRET_ACCESS_KEY": "read by the library",
    }
    chosen = choose(parse("as://a/c"), environ)
    assert {name: chosen[name] for name in ("account_str", "account_key", "auth_type", "client_id")} == {
        "account_str": "account",
        "account_key": "key",
        "auth_type": "managed_identity",
        "client_id": "client",
    }
    assert choose(parse("s3://b"), environ) == choose(parse("gs://b"), environ) == Credentials()
    with pytest.raises(StartupError, match="AZURE_STORAGE_AUTH_TYPE must be managed_identity or default, got 'magic'"):
        choose(parse("as://a/c"), {"AZURE_STORAGE_AUTH_TYPE": "magic"})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not JSON"),
        ([], "cannot be used"),
        ({"s3": []}, "must be an object of URL beginnings"),
        ({"s3": {"": "key"}}, "must be an object of strings"),
        ({"s3": {"": {"key_id": 1}}}, "must be an object of strings"),
        ({"s3": {"": {"keyid": "hush"}}}, "unknown field 'keyid', it may have key_id, profile"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, content: Any, sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence) as caught:
        choose(parse("s3://b"), written(tmp_path, content))
    assert "hush" not in str(caught.value)


def test_a_key_file_is_named_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="must be the path of a key file"):
        choose(parse("gs://b"), written(tmp_path, {"gs": {"": {"file": "x"}}}))
    with pytest.raises(StartupError, match="cannot be read: No such file"):
        choose(parse("gs://b"), {FILE: str(tmp_path / "missing")})


def test_nobody_sees_them() -> None:
    assert "hush" not in repr(Credentials({"secret_key": "hush"}))
