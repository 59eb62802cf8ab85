"""A collector for tests: OTLP over HTTP, read with the official messages. It may be made to refuse or to hang.

Other paths take anything, such as webhooks.
"""

from __future__ import annotations

import gzip
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Span:
    """One span as it came; attributes, and those of its resource, as plain values."""

    name: str
    trace_id: str
    id: str
    parent: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    events: dict[str, int]
    error: str
    state: str = ""


@dataclass
class Receiver:
    """`url` is where spans go. While `status` is not 200 they are refused; while `holds` is set they wait."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    status: int = 200
    goes_on: threading.Event = field(default_factory=threading.Event)
    others: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """What else was posted here: (path, headers)."""

    def of(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def tree(self, trace_id: str) -> dict[str, list[str]]:
        """The names of the children of every span that has some, by its name."""
        names = {span.id: span.name for span in self.of(trace_id)}
        found: dict[str, list[str]] = defaultdict(list)
        for span in self.of(trace_id):
            if span.parent in names:
                found[names[span.parent]].append(span.name)
        return {name: sorted(children) for name, children in found.items()}

    def __enter__(self) -> Receiver:
        receiver = self
        receiver.goes_on.set()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert receiver.goes_on.wait(60)
                if self.path != "/v1/traces":
                    receiver.others.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                elif receiver.status == 200:
                    receiver.spans += _spans(ExportTraceServiceRequest.FromString(body))
                self.send_response(receiver.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.goes_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _spans(request: ExportTraceServiceRequest) -> list[Span]:
    return [
        Span(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _values(span.attributes),
            _values(resource.resource.attributes),
            {event.name: event.time_unix_nano for event in span.events},
            span.status.message if span.status.code == 2 else "",
            span.trace_state,
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
