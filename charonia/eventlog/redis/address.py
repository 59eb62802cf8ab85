"""What a log URL says: where the server is and how to sign in. Opening sockets is `connection`'s.

redis://[user:password@]host[:6379][/db]
rediss://...            the same over TLS; ?ssl_ca_certs=, ssl_certfile=, ssl_keyfile=, ssl_cert_reqs=none
unix://[user:password@]/path/to/socket[?db=0]
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

from charonia.errors import StartupError


@dataclass(frozen=True, slots=True)
class Address:
    """`path` is set for a Unix socket, `host` for TCP. `text` is for messages: it never holds a password."""

    text: str
    path: str = ""
    host: str = ""
    port: int = 6379
    database: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None


def parse_address(url: str) -> Address:
    """Raises `StartupError` with a sentence for a URL that cannot be used."""
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        path = unquote(parts.path)
        database = query.get("db", "0" if parts.scheme == "unix" else path.strip("/") or "0")
        number = int(database)
    except ValueError as error:
        raise StartupError(f"the event log URL cannot be read: {error}") from None
    username, password = unquote(parts.username or ""), unquote(parts.password or "")
    if parts.scheme == "unix":
        if not path:
            raise StartupError("the event log URL unix:// names no socket path")
        return Address(f"unix://{path}", path=path, database=number, username=username, password=password)
    if parts.scheme not in ("redis", "rediss"):
        raise StartupError(f"the event log URL must begin with redis://, rediss:// or unix://, not '{parts.scheme}://'")
    host = parts.hostname or "localhost"
    text = f"{parts.scheme}://{host}:{port}/{number}"
    tls = _tls(query) if parts.scheme == "rediss" else None
    return Address(text, host=host, port=port, database=number, username=username, password=password, tls=tls)


def _tls(query: dict[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=query.get("ssl_ca_certs"))
        if query.get("ssl_cert_reqs") == "none":
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if "ssl_certfile" in query:
            context.load_cert_chain(query["ssl_certfile"], query.get("ssl_keyfile"))
    except OSError as error:
        raise StartupError(f"a certificate of the event log URL cannot be loaded: {error}") from None
    return context
