"""A small receiver of webhooks: counts deliveries per webhook-id, so that a lost one or a changed id is seen."""

from __future__ import annotations

import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """Listens on loopback; `url` is where to deliver to. A context manager."""

    def __init__(self) -> None:
        received: Counter[str] = Counter()
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                with lock:
                    received[self.headers.get("webhook-id", "")] += 1
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_args: Any) -> None:
                """Quiet."""

        self.received = received
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
