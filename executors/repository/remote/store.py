"""An object store of any provider: its address (R7), and the interface of its adapter. Pure.

    s3://bucket/path    s3://host:port/bucket/path    s3://https://host:port/bucket/path
    gs://bucket/path
    as://account/container/path    as://account.host.of.cloud/container/path    as://http://host:port/account/container

`host:port` without a scheme means HTTP, as in Triton. The third form of `as://` is for emulators.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from charonia.errors import StartupError, Unavailable, without_credentials


class RemoteError(Unavailable):
    """A call of a store failed. The message names the repository, and says what may help."""


class ObjectChanged(RemoteError):
    """An object has changed since it was listed."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """An object in a repository. `name` is relative to the repository's prefix.

    `stamp` changes with the content, and may change with the time alone. `is_directory`: the object only marks a
    directory; its name has no trailing slash.
    """

    name: str
    size_bytes: int
    stamp: str
    is_directory: bool = False


class Sink(Protocol):
    """Receives content piece by piece."""

    def write(self, data: bytes, /) -> int: ...


class ObjectStore(Protocol):
    """One repository's store. Used from several threads."""

    def objects(self, below: str = "") -> Iterator[RemoteObject]:
        """Yield all objects whose names begin with `below`, in any order. Raises `RemoteError`."""

    def copy(self, found: RemoteObject, sink: Sink) -> None:
        """Write an object's content, as it was when listed, to `sink`. Raises `RemoteError`, and what `sink` raises."""

    def close(self) -> None:
        """Close the connections."""


S3, GCS, AZURE = "s3", "gs", "as"
_FORMS = {
    S3: "s3://bucket/path or s3://https://host:port/bucket/path",
    GCS: "gs://bucket/path",
    AZURE: "as://account/container/path",
}
_SERVER = re.compile(r"(?P<scheme>https?)://(?P<host>[^/@?#]+)/(?P<rest>.*)", re.DOTALL)
_HOST_AND_PORT = re.compile(r"(?P<host>[A-Za-z0-9.\-]+:[0-9]+)/(?P<rest>.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._\-$]*")
_ACCOUNT = re.compile(r"[A-Za-z0-9][A-Za-z0-9.\-]*")
_AZURE_HOST = "blob.core.windows.net"


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """A parsed URL. `url` has no trailing slash. `endpoint` is the server's URL, "" for the provider's default.

    `bucket` is a container in Azure. `prefix` is the common prefix of the repository's object names: empty, or with a
    trailing slash.
    """

    provider: str
    url: str
    bucket: str
    prefix: str
    endpoint: str = ""
    account: str = ""


def is_remote(path: str) -> bool:
    return provider_of(path) != ""


def provider_of(path: str) -> str:
    """Return `S3`, `GCS` or `AZURE`; "" for a local path."""
    scheme, separator, _ = path.partition("://")
    return scheme if separator and scheme in _FORMS else ""


def parse(url: str) -> RemoteAddress:
    """Parse a repository's URL. Raises `StartupError` for one without a bucket."""
    provider = provider_of(url)
    rest = url.removeprefix(f"{provider}://").rstrip("/")
    url = f"{provider}://{rest}"
    endpoint = account = ""
    if provider != GCS and (server := _SERVER.fullmatch(rest)):
        endpoint, rest = f"{server['scheme']}://{server['host']}", server["rest"]
    elif provider == S3 and (server := _HOST_AND_PORT.fullmatch(rest)):
        endpoint, rest = f"http://{server['host']}", server["rest"]
    if provider == AZURE:
        account, _, rest = rest.partition("/")
        if not _ACCOUNT.fullmatch(account):
            raise _bad(provider, url)
        if endpoint:
            endpoint = f"{endpoint}/{account}"
        else:
            endpoint = f"https://{account}" if "." in account else f"https://{account}.{_AZURE_HOST}"
            account = account.partition(".")[0]
    bucket, _, path = rest.partition("/")
    segments = [segment for segment in path.split("/") if segment]
    if not _BUCKET.fullmatch(bucket) or "." in segments or ".." in segments:
        raise _bad(provider, url)
    return RemoteAddress(provider, url, bucket, "".join(f"{segment}/" for segment in segments), endpoint, account)


def _bad(provider: str, url: str) -> StartupError:
    return StartupError(
        f"the model repository '{without_credentials(url)}' is no URL of a repository: expected {_FORMS[provider]}"
    )
