"""What URLs of remote repositories say (R7)."""

from __future__ import annotations

import pytest

from charonia.errors import StartupError
from executors.repository.remote.store import RemoteAddress, is_remote, parse


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("s3://bucket", RemoteAddress("s3", "s3://bucket", "bucket", "")),
        ("s3://bucket/", RemoteAddress("s3", "s3://bucket", "bucket", "")),
        ("s3://my.bucket-1/a/b/", RemoteAddress("s3", "s3://my.bucket-1/a/b", "my.bucket-1", "a/b/")),
        ("s3://bucket/a//b", RemoteAddress("s3", "s3://bucket/a//b", "bucket", "a/b/")),
        (
            "s3://https://minio.local:9000/bucket/a",
            RemoteAddress("s3", "s3://https://minio.local:9000/bucket/a", "bucket", "a/", "https://minio.local:9000"),
        ),
        (
            "s3://http://[::1]:9000/bucket",
            RemoteAddress("s3", "s3://http://[::1]:9000/bucket", "bucket", "", "http://[::1]:9000"),
        ),
        (
            "s3://10.0.0.1:9000/bucket/a",
            RemoteAddress("s3", "s3://10.0.0.1:9000/bucket/a", "bucket", "a/", "http://10.0.0.1:9000"),
        ),
        ("gs://bucket/a/b", RemoteAddress("gs", "gs://bucket/a/b", "bucket", "a/b/")),
        (
            "as://account/container/a",
            RemoteAddress(
                "as", "as://account/container/a", "container", "a/", "https://account.blob.core.windows.net", "account"
            ),
        ),
        (
            "as://account.blob.core.chinacloudapi.cn/container",
            RemoteAddress(
                "as",
                "as://account.blob.core.chinacloudapi.cn/container",
                "container",
                "",
                "https://account.blob.core.chinacloudapi.cn",
                "account",
            ),
        ),
        (
            "as://http://127.0.0.1:10000/account/container/a",
            RemoteAddress(
                "as",
                "as://http://127.0.0.1:10000/account/container/a",
                "container",
                "a/",
                "http://127.0.0.1:10000/account",
                "account",
            ),
        ),
    ],
)
def test_what_a_url_says(url: str, address: RemoteAddress) -> None:
    assert is_remote(url)
    assert parse(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///path",
        "s3://https://host:9000",
        "s3://https://host:9000/",
        "s3://https://user:secret@host/bucket",
        "s3://https://user:s/secret@host/bucket",
        "s3://user:secret@bucket/path",
        "s3://bu cket/path",
        "s3://bucket/../other",
        "gs://",
        "gs://../x",
        "as://account",
        "as://account/",
        "as:///container",
        "as://http://127.0.0.1:10000/account",
    ],
)
def test_what_is_no_repository(url: str) -> None:
    with pytest.raises(StartupError, match="is no URL of a repository: expected ") as caught:
        parse(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("path", ["/models", "models", "s3:/x", "http://host/models", "s3", "S3://bucket", ""])
def test_paths_of_this_machine(path: str) -> None:
    assert not is_remote(path)
