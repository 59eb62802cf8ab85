"""A KServe v2 server over HTTP that is not Charonia: JSON only, no jobs, one model `double`. It may misbehave."""

from __future__ import annotations

import itertools
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class PlainServer:
    """`refusals` are statuses and headers of the next answers to inferences; 0 closes the connection instead.

    While `drips` is set, answers come byte by byte and never end. `inferences` are the headers of those received.
    """

    url: str = ""
    refusals: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    drips: threading.Event = field(default_factory=threading.Event)
    inferences: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def plain_server(tls: ssl.SSLContext | None = None) -> Iterator[PlainServer]:
    state = PlainServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/v2":
                self.answer(200, {"name": "plain", "version": "1", "extensions": []})
            else:
                self.answer(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.inferences.append({name.lower(): value for name, value in self.headers.items()})
            status, headers = state.refusals.pop(0) if state.refusals else (200, {})
            if status == 0:
                self.close_connection = True
            elif status == 200:
                doubled = [2 * value for value in asked["inputs"][0]["data"]]
                output = {**asked["inputs"][0], "name": "Y", "data": doubled}
                self.answer(200, {"model_name": "double", "outputs": [output]})
            else:
                self.answer(status, {"error": "not now"}, **headers)

        def answer(self, status: int, document: Any, **headers: str) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            drips = state.drips.is_set()
            self.send_header("content-length", str(len(body) + (1_000_000 if drips else 0)))
            self.end_headers()
            for at in itertools.count() if drips else ():
                self.wfile.write(body[at : at + 1] or b" ")
                if not state.drips.is_set() or stopped.wait(0.05):
                    return
            self.wfile.write(body)

    stopped = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    state.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield state
    finally:
        stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()
