"""A raw-ASGI echo of the v2 binary exchange on uvicorn: the floor that the HTTP front is compared with.

It answers metadata, readiness and inference of one identity model ([-1,16] FP32); it validates nothing.
"""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

METADATA = {
    "name": "identity",
    "versions": ["1"],
    "platform": "echo",
    "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 16]}],
    "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 16]}],
}
_LENGTH = b"inference-header-content-length"


def answer_head(request_head: bytes) -> bytes:
    """The JSON part of the answer to a request with this JSON part: each input comes back as an output."""
    request = json.loads(request_head)
    outputs = [{**tensor, "name": tensor["name"].replace("INPUT", "OUTPUT")} for tensor in request["inputs"]]
    answer = {"model_name": "identity", "model_version": "1", "outputs": outputs}
    return json.dumps(answer, separators=(",", ":")).encode()


def make_app() -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The ASGI application; it keeps the answer's JSON part per distinct request one."""
    heads: dict[bytes, bytes] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            message = await receive()
            body: bytes = message["body"]
            if message.get("more_body"):
                parts = [body]
                while message.get("more_body"):
                    message = await receive()
                    parts.append(message["body"])
                body = b"".join(parts)
            length = int(next((value for name, value in scope["headers"] if name == _LENGTH), len(body)))
            head = heads.get(body[:length])
            if head is None:
                head = heads[body[:length]] = answer_head(body[:length])
            answer, extra = head + body[length:], [(_LENGTH, b"%d" % len(head))]
        else:
            answer = b"" if scope["path"].startswith("/v2/health") else json.dumps(METADATA).encode()
            extra = []
        headers = [(b"content-length", b"%d" % len(answer)), *extra]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return app


def main() -> None:
    """Serves on loopback and prints "listening HOST:PORT"."""
    import uvicorn

    parser = argparse.ArgumentParser(prog="echo_http")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    # IPPROTO_TCP is named so that the loop sets TCP_NODELAY on what it accepts.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", options.port))
    listener.listen(1024)
    print(f"listening 127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(make_app(), log_level="warning", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
