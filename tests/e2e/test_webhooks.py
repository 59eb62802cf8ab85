"""`charonia serve` tells callers of the ends of their jobs: signed with its own secret, and again after a kill."""

from __future__ import annotations

import json
import os
import queue
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from e2e_asking import on_the_page
from standardwebhooks.webhooks import Webhook

PATIENCE_S = 30.0


class Endpoint:
    """Keeps what is posted to it; the first `refusals` posts get 500."""

    def __init__(self) -> None:
        self.received: queue.Queue[tuple[dict[str, str], bytes]] = queue.Queue()
        self.refusals = 0
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                endpoint.received.put(({name.lower(): value for name, value in self.headers.items()}, body))
                endpoint.refusals -= 1
                self.send_response(204 if endpoint.refusals < 0 else 500)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"

    def next(self) -> tuple[dict[str, str], bytes]:
        return self.received.get(timeout=PATIENCE_S)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


def submit(server: Any, url: str) -> tuple[int, dict[str, Any]]:
    """Submit one job; status and body."""
    inputs = [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": list(range(16))}]
    headers = {"prefer": "respond-async", "charonia-webhook": url, "content-type": "application/json"}
    status, body = server.request("POST", "/v2/models/identity/infer", json.dumps({"inputs": inputs}).encode(), headers)
    return status, json.loads(body)


def webhook_of(server: Any, job_id: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """How a job's webhook stands, once it is as wanted."""
    give_up_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_at:
        view = json.loads(server.get(f"/v2/jobs/{job_id}")[1])
        if wanted(view.get("webhook", {})):
            return dict(view["webhook"])
        time.sleep(0.02)
    raise AssertionError(view)


@pytest.mark.e2e
def test_serve_tells_of_jobs_and_goes_on_after_its_sender_is_killed(
    serve: Callable[..., Any], few_models: Path, endpoint: Endpoint
) -> None:
    server = serve(few_models, "--allow-webhooks=true", "--webhook-allow=127.0.0.1/32", "--webhook-retry-secs=0.2")
    endpoint.refusals = 1
    job_id = submit(server, endpoint.url)[1]["id"]
    (first, body), (second, again) = endpoint.next(), endpoint.next()
    secret = server.state_dir / "webhook-secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert str(secret) in server.log()
    for headers in (first, second):
        told = Webhook(secret.read_text().strip()).verify(body.decode(), headers)
    assert (first["webhook-id"], body) == (second["webhook-id"], again)
    assert (told["type"], told["data"]["id"]) == ("job.succeeded", job_id)
    assert server.get(told["data"]["result_url"])[0] == 200
    delivery = webhook_of(server, job_id, lambda webhook: webhook.get("state") == "delivered")
    assert (delivery["attempts"], delivery["last_status"]) == (2, 204)

    (pid,) = server.pids("webhooks")
    os.kill(pid, signal.SIGKILL)
    job_id = submit(server, endpoint.url)[1]["id"]
    assert json.loads(endpoint.next()[1])["data"]["id"] == job_id
    on_the_page(server, "charonia_webhook_deliveries_total")

    status, refusal = submit(server, "http://169.254.169.254/")
    assert status == 400
    assert "may not reach" in refusal["error"]
    assert server.stop() == 0
