"""Listening sockets: what a port that is shared changes about them."""

from __future__ import annotations

import resource
import socket

import pytest

from gateway.listening import listen


@pytest.mark.parametrize("reuse_port", [False, True])
def test_a_listener_is_a_tcp_socket_that_does_not_block(reuse_port: bool) -> None:
    with listen("127.0.0.1", 0, service="HTTP", reuse_port=reuse_port) as listener:
        assert listener.proto == socket.IPPROTO_TCP, "asyncio switches Nagle's algorithm off only of such a socket"
        assert (listener.family, listener.type) == (socket.AF_INET, socket.SOCK_STREAM)
        assert not listener.getblocking()
        assert not listener.get_inheritable()
        assert bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)) is reuse_port
        with socket.create_connection(listener.getsockname()):
            listener.setblocking(True)
            listener.accept()[0].close()


def test_a_shared_listener_is_above_its_connections() -> None:
    """The kernel lets go of it first when the process is killed: no new connection dies with the old ones."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    listeners = [listen("127.0.0.1", 0, service="HTTP", reuse_port=True) for _ in range(2)]
    for listener in listeners:
        assert listener.fileno() >= min(limit, 65_536) - 64
        listener.close()


@pytest.mark.parametrize("free", [1, 2, 8])
def test_few_descriptors_are_enough(free: int) -> None:
    """With one alone there is none for the copy: the listener stays as it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [socket.socket() for _ in range(16)]  # above the gaps that others have left
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(each.fileno() for each in held) + 1, hard))
        for each in held[-free:]:
            each.close()
        listen("127.0.0.1", 0, service="HTTP", reuse_port=True).close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in held:
            each.close()
