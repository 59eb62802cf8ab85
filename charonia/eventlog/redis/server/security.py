"""Checks whether a log server is safe to use on a shared network: `--require-secure-log`.

A process that can write to the log controls all requests. So a network connection must be encrypted, to a server with a
verified certificate, by a user other than Redis' default one; and the server must not answer callers without a
password. Network rules and `infra/redis/users.acl.template` restrict access to its port and its users' rights.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from charonia.errors import StartupError

from .address import Address, parse_address
from .sentinel import Primary

_ANSWER_S = 5.0


async def check_secure(url: str, what: str = "the event log") -> None:
    """Raises `StartupError` with what is unsafe about the server at this URL; `what` names it in words.

    The directory's permissions protect a Unix socket. A server that cannot be reached is reported by the part that
    needs it.
    """
    address = parse_address(url)
    if address.path:
        return
    fault = _fault(address)
    if not fault:
        for place in await _places(address):
            if await _answers_anybody(*place, address.tls):
                host, port = place
                fault = (
                    f"{host}:{port} answers callers who have not signed in: its user 'default' must be off, as in "
                    "infra/redis/users.acl.template, or have a password"
                )
                break
    if fault:
        raise StartupError(f"--require-secure-log: {what} at {address.text} is not safe: {fault}")


def _fault(address: Address) -> str:
    """The fault of the address alone, "" for none."""
    if address.tls is None:
        return "the connection is not encrypted; use rediss:// (or rediss+sentinel://, rediss+cluster://)"
    if address.tls.verify_mode is not ssl.CERT_REQUIRED or not address.tls.check_hostname:
        return "its certificate is not verified; leave ssl_cert_reqs out"
    if address.username in ("", "default"):
        return "the URL names no user, or 'default', which has all rights; give each role a user of its own"
    return ""


async def _places(address: Address) -> tuple[tuple[str, int], ...]:
    """All known servers of the address."""
    if address.sentinels:
        with contextlib.suppress(ConnectionError):
            return (*address.sentinels, await Primary(address).find())
        return address.sentinels
    return address.nodes or ((address.host, address.port),)


async def _answers_anybody(host: str, port: int, tls: ssl.SSLContext | None) -> bool:
    """Whether the server serves a caller that has not authenticated."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
            try:
                writer.write(b"PING\r\n")
                return (await reader.readline()).startswith(b"+")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
