"""What a log URL says: where the server is and how to sign in. Opening sockets is `hot_connection`'s.

redis://[user:password@]host[:6379][/db]
rediss://...            the same over TLS; ?ssl_ca_certs=, ssl_certfile=, ssl_keyfile=, ssl_cert_reqs=none
unix://[user:password@]/path/to/socket[?db=0]
redis+sentinel://[user:password@]host[:26379][,host[:26379]...]/service[/db]
                        the primary that these sentinels name; ?sentinel_username=, sentinel_password= for themselves
rediss+sentinel://...   the same over TLS, sentinels and servers alike; options as for rediss
redis+cluster://[user:password@]host[:6379][,host[:6379]...]
rediss+cluster://...    the Redis Cluster that some of these servers belong to; options as for rediss
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit, urlunsplit

from charonia.errors import ENCODE_CREDENTIALS, StartupError, refuse_passphrase, without_credentials

_SENTINEL = "redis+sentinel://"
_SENTINEL_OVER_TLS = "rediss+sentinel://"
_SENTINEL_PORT = 26379
_CLUSTER = "redis+cluster://"
_CLUSTER_OVER_TLS = "rediss+cluster://"
_CREDENTIALS = f"the event log URL cannot be read: {ENCODE_CREDENTIALS}"


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed log URL. `path` is set for a Unix socket, `host` for TCP, `sentinels` and `service` for Sentinel.

    `text` is for messages: it never holds a password.
    """

    text: str
    path: str = ""
    host: str = ""
    port: int = 6379
    database: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    sentinels: tuple[tuple[str, int], ...] = ()
    service: str = ""
    sentinel_username: str = ""
    sentinel_password: str = field(default="", repr=False)
    nodes: tuple[tuple[str, int], ...] = ()
    """Some servers of a Redis Cluster; the others are found through them."""
    in_cluster: bool = False
    """It is one server of a cluster, and holds some of the keys."""


class _UnusableCertificate(StartupError):
    """Its words are of a file alone."""


def parse_address(url: str) -> Address:
    """Parse a URL. Raises `StartupError` with a sentence for an invalid one, which holds none of its credentials."""
    try:
        return _parsed(url)
    except _UnusableCertificate:
        raise
    except StartupError:
        if "@" not in url:
            raise
    _parsed(without_credentials(url))  # else the sentence may quote a password: as the port, say, or the database
    raise StartupError(_CREDENTIALS)


def _parsed(url: str) -> Address:
    if url.startswith((_SENTINEL, _SENTINEL_OVER_TLS)):
        return _sentinel_address(url)
    if url.startswith((_CLUSTER, _CLUSTER_OVER_TLS)):
        return _cluster_address(url)
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        path = unquote(parts.path)
        database = query.get("db", "0" if parts.scheme == "unix" else path.strip("/") or "0")
    except ValueError as error:
        raise StartupError(f"the event log URL cannot be read: {error}") from None
    if parts.scheme not in ("redis", "rediss", "unix"):
        begins = f"not '{parts.scheme}://'" if "://" in url else "as in redis://localhost:6379"
        raise StartupError(
            "the event log URL must begin with redis://, rediss://, unix://, redis+sentinel://, redis+cluster:// or "
            f"rediss+cluster://, {begins}"
        )
    if parts.scheme != "unix":
        _check_rest(parts)
    if not database.isdecimal():
        raise StartupError(f"the event log URL names the database '{database}', which is no number")
    number = int(database)
    username, password = unquote(parts.username or ""), unquote(parts.password or "")
    if parts.scheme == "unix":
        if not path:
            raise StartupError("the event log URL unix:// names no socket path")
        return Address(f"unix://{path}", path=path, database=number, username=username, password=password)
    host = parts.hostname or "localhost"
    text = f"{parts.scheme}://{host}:{port}/{number}"
    tls = _tls(query) if parts.scheme == "rediss" else None
    return Address(text, host=host, port=port, database=number, username=username, password=password, tls=tls)


def _split(url: str) -> tuple[SplitResult, str]:
    """The parts of a URL with several hosts, and the list of hosts, which is removed from the parts.

    urlsplit takes a bracketed address for all hosts, and refuses others beside it (Python from 3.11.12 on, and 3.11.2
    in Debian).
    """
    scheme, _, rest = url.partition("://")
    end = min((rest + sign).index(sign) for sign in "/?#")
    return urlsplit(f"{scheme}://{rest[end:]}"), rest[:end]


def _check_rest(parts: SplitResult) -> None:
    """Raises `StartupError` for a part behind the hosts that can only be the end of a password."""
    if any("@" in part for part in (parts.path, parts.fragment, parts.query.partition("=")[0])):
        raise StartupError(_CREDENTIALS)


def _sentinel_address(url: str) -> Address:
    try:
        parts, netloc = _split(url)
        _check_rest(parts)
        credentials, _, hosts = netloc.rpartition("@")
        username, _, password = credentials.partition(":")
        sentinels = tuple(_host(host) for host in hosts.split(",") if host)
        service, _, database = unquote(parts.path).strip("/").partition("/")
        number = int(database or "0")
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    except ValueError as error:
        raise StartupError(f"the event log URL cannot be read: {error}") from None
    if not sentinels or not service:
        raise StartupError(f"the event log URL must read {_SENTINEL}host:port[,host:port]/service[/db]")
    over_tls = url.startswith(_SENTINEL_OVER_TLS)
    return Address(
        f"{parts.scheme}://{hosts}/{service}/{number}",
        tls=_tls(query) if over_tls else None,
        database=number,
        username=unquote(username),
        password=unquote(password),
        sentinels=sentinels,
        service=service,
        sentinel_username=query.get("sentinel_username", ""),
        sentinel_password=query.get("sentinel_password", ""),
    )


def _cluster_address(url: str) -> Address:
    try:
        parts, netloc = _split(url)
        _check_rest(parts)
        credentials, _, hosts = netloc.rpartition("@")
        username, _, password = credentials.partition(":")
        nodes = tuple(_host(host, 6379) for host in hosts.split(",") if host)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    except ValueError as error:
        raise StartupError(f"the event log URL cannot be read: {error}") from None
    if not nodes:
        raise StartupError(f"the event log URL must read {_CLUSTER}host:port[,host:port]")
    if parts.path.strip("/") not in ("", "0"):
        raise StartupError(f"a Redis Cluster has no databases, the event log URL names '{parts.path.strip('/')}'")
    return Address(
        f"{parts.scheme}://{hosts}",
        username=unquote(username),
        password=unquote(password),
        tls=_tls(query) if url.startswith(_CLUSTER_OVER_TLS) else None,
        nodes=nodes,
    )


def _host(text: str, port: int = _SENTINEL_PORT) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    return parts.hostname or "localhost", parts.port or port


def with_password(url: str, file: str, option: str = "--log-password-file") -> str:
    """The URL with the password from a file, so that no process list shows it. Raises `StartupError`."""
    if not file:
        return url
    try:
        password = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise StartupError(f"{option}: '{file}' cannot be read: {reason}") from None
    parts, netloc = _split(url)
    user, _, host = netloc.rpartition("@")
    name, _, known = user.partition(":")
    if known:
        raise StartupError(f"{option}: the URL holds a password already")
    return urlunsplit(parts._replace(netloc=f"{name}:{quote(password, safe='')}@{host}"))


def _tls(query: dict[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=query.get("ssl_ca_certs"))
        if query.get("ssl_cert_reqs") == "none":
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if "ssl_certfile" in query:
            context.load_cert_chain(query["ssl_certfile"], query.get("ssl_keyfile"), refuse_passphrase)
    except OSError as error:
        raise _UnusableCertificate(f"a certificate of the event log URL cannot be loaded: {error}") from None
    return context
