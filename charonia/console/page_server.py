"""Serves the console's application over a port or a unix socket, with uvicorn, until a signal."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp
from uvicorn import Config, Server

from charonia.errors import StartupError

_CLOSE_S = 1
"""How long open pages may take to end when the console stops: their streams of events never end by themselves."""
_BACKLOG = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where to listen: at a unix socket, or without one at an address and a port, 0 for a free one."""

    socket_path: str = ""
    address: str = "127.0.0.1"
    port: int = 0


async def serve_pages(app: ASGIApp, place: Place, on_listening: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `on_listening` gets the address for people once connections are accepted.

    Raises `StartupError` if the place cannot be had.
    """
    listener, where = _listen(place)
    config = Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=_CLOSE_S, ws="none"
    )
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises the signal again when it has ended
        signal.signal(number, lambda *_: None)
    on_listening(where)  # the system keeps connections until the server takes them
    await Server(config).serve(sockets=[listener])


def _listen(place: Place) -> tuple[socket.socket, str]:
    path = place.socket_path
    where = path or f"{place.address}:{place.port}"
    family = socket.AF_UNIX if path else socket.AF_INET6 if ":" in place.address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if path:
            Path(path).unlink(missing_ok=True)
            listener.bind(path)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((place.address, place.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(f"the console cannot listen on '{where}': {error.strerror or error}") from None
    shown = f"[{place.address}]" if ":" in place.address else place.address
    return listener, path or f"http://{shown}:{listener.getsockname()[1]}/console"
