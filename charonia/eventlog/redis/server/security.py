"""Whether a server of the log is safe to use where others can reach it: `--require-secure-log`.

Who can write to the log decides about everybody's requests. So a network connection has to be encrypted, to a server
whose certificate is verified, by a user who is not the one that every Redis has; and a server must not answer callers
without a password. Who may reach its port, and what each user may do, is for the network and for
`infra/redis/users.acl.template`.
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
    """Raises `StartupError` with what is not safe about the server at this URL, `what` in words.

    A Unix socket is guarded by the rights of its directory. A server that cannot be reached is said by who needs it.
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
    """What the address alone says, "" for nothing."""
    if address.tls is None:
        return "the connection is not encrypted; use rediss:// (or rediss+sentinel://, rediss+cluster://)"
    if address.tls.verify_mode is not ssl.CERT_REQUIRED or not address.tls.check_hostname:
        return "its certificate is not verified; leave ssl_cert_reqs out"
    if address.username in ("", "default"):
        return "the URL names no user, or 'default', which has all rights; give each role a user of its own"
    return ""


async def _places(address: Address) -> tuple[tuple[str, int], ...]:
    """All servers that are known to belong to the address."""
    if address.sentinels:
        with contextlib.suppress(ConnectionError):
            return (*address.sentinels, await Primary(address).find())
        return address.sentinels
    return address.nodes or ((address.host, address.port),)


async def _answers_anybody(host: str, port: int, tls: ssl.SSLContext | None) -> bool:
    """Whether the server does what a caller asks who has not signed in."""
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
