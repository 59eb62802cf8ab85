"""A server that only reads and writes: what `neighbours` compares this one with.

It reads a request, waits until one would have been answered at the given pace, and writes as many bytes as this
server's answer had. So the same client moves the same bytes as often, and no server is at work. What small calls to the
idle server take beside that is what no server on this machine could undercut.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from charonia.offload.time_slices import LOOP_SLICE_NS, set_time_slice

PIECE_BYTES = 1 << 18
"""As this server's slices."""


class Pace:
    """Answers come one behind the other, not earlier than `interval_s` apart."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_s = time.monotonic()

    def wait(self) -> None:
        now_s = time.monotonic()
        self._next_s = max(self._next_s + self._interval_s, now_s)
        time.sleep(max(0.0, self._next_s - now_s))


def read_request(connection: socket.socket, memory: bytearray) -> bool:
    """Read one HTTP request with a Content-Length to its end; False where the client has closed."""
    head = b""
    while b"\r\n\r\n" not in head:
        piece = connection.recv(1 << 16)
        if not piece:
            return False
        head += piece
    head, _, body = head.partition(b"\r\n\r\n")
    lengths = [line.partition(b":")[2] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    left = int(lengths[0]) - len(body) if lengths else 0
    while left > 0:
        size = connection.recv_into(memory, min(left, len(memory)))
        if not size:
            return False
        left -= size
    return True


def write_answer(connection: socket.socket, size: int) -> None:
    """An answer of `size` zero bytes."""
    piece = bytes(min(size, PIECE_BYTES))
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
    for at in range(0, size, PIECE_BYTES):
        connection.sendall(memoryview(piece)[: size - at])


def serve_http(listener: socket.socket, pace: Pace, answer_bytes: int) -> None:
    """Serve each connection in a thread, for ever. 1,500 stalled ones cost a thread each, which does nothing."""

    def serve(connection: socket.socket) -> None:
        set_time_slice(LOOP_SLICE_NS, inherited=False)
        memory = bytearray(PIECE_BYTES)
        with connection, suppress(OSError):
            while read_request(connection, memory):
                pace.wait()
                write_answer(connection, answer_bytes)

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def serve_grpc(pace: Pace, answer_bytes: int) -> tuple[Any, int]:
    """A gRPC server that answers every call with so many bytes; returns it and its port."""
    import grpc

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, _details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(self.answer)

        def answer(self, _message: bytes, _context: Any) -> bytes:
            pace.wait()
            return bytes(answer_bytes)

    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(1), [Handler()], options=limits)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


def main(interval_s: float, answer_bytes: int) -> None:
    """Serve until standard input ends; prints the two addresses."""
    pace = Pace(interval_s)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    threading.Thread(target=serve_http, args=(listener, pace, answer_bytes), daemon=True).start()
    server, port = serve_grpc(pace, answer_bytes)
    print(f"127.0.0.1:{listener.getsockname()[1]} 127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    server.stop(None)
    os._exit(0)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
