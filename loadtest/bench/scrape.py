"""Reads a server's own counters: Prometheus text and the log server's command statistics."""

from __future__ import annotations

import http.client
import socket

from loadtest.model import CONTROL_TIMEOUT_S, LoadTestError

REQUESTS_APPENDED = "charonia_log_requests_appended_total"
ENTRIES_APPENDED = "charonia_log_entries_appended_total"


def fetch(address: str, path: str) -> tuple[int, bytes]:
    """Status and body of a GET. Raises LoadTestError when there is no answer."""
    connection = http.client.HTTPConnection(address, timeout=CONTROL_TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise LoadTestError(f"GET http://{address}{path}: {error}") from None
    finally:
        connection.close()


def sum_metric(text: str, name: str) -> float | None:
    """Sum of a metric over all its label sets; None when it is not exposed."""
    total: float | None = None
    for line in text.splitlines():
        if not line.startswith(name) or line[len(name) : len(name) + 1] not in ("{", " "):
            continue
        # Label values may hold spaces, the value and an optional timestamp follow the closing brace.
        rest = line[line.rindex("}") + 1 :] if line[len(name)] == "{" else line[len(name) :]
        total = (total or 0.0) + float(rest.split()[0])
    return total


def read_appends(metrics_address: str) -> tuple[float, float] | None:
    """Requests and entries that gateways appended to the log; None when the metrics do not tell."""
    status, body = fetch(metrics_address, "/metrics")
    if status != 200:
        return None
    text = body.decode(errors="replace")
    requests, entries = sum_metric(text, REQUESTS_APPENDED), sum_metric(text, ENTRIES_APPENDED)
    return None if requests is None or entries is None else (requests, entries)


def parse_commands(info: str) -> int:
    """Sum of the calls in the text of INFO commandstats; INFO itself is left out, scripts count with what they call."""
    calls = 0
    for line in info.splitlines():
        name, _, fields = line.partition(":")
        if name.startswith("cmdstat_") and name != "cmdstat_info":
            calls += int(fields.split(",", 1)[0].removeprefix("calls="))
    return calls


def read_commands(log_url: str) -> int:
    """Commands that the log server has executed so far. Only unix:// URLs of private logs can be asked."""
    path = log_url.removeprefix("unix://")
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(CONTROL_TIMEOUT_S)
            client.connect(path)
            client.sendall(b"*2\r\n$4\r\nINFO\r\n$12\r\ncommandstats\r\n")
            answer = b""
            while b"\r\n" not in answer:
                answer += _received(client)
            head, _, body = answer.partition(b"\r\n")
            while len(body) < int(head[1:]):
                body += _received(client)
    except (OSError, ValueError) as error:
        raise LoadTestError(f"INFO commandstats of {log_url}: {error}") from None
    return parse_commands(body.decode())


def _received(client: socket.socket) -> bytes:
    data = client.recv(1 << 16)
    if not data:
        raise OSError("the log server closed the connection")
    return data
