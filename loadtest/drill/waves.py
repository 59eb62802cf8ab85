"""The drill's load of waves: keyless binary requests, all alike, that the gateway's express lane recognises.

Each call has a deadline; its answer must be that of its own input. Afterwards the log server itself is asked what is
left of waves in it. Plain sockets: a request is recognised only where it comes whole.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .clients import RETRY_S, Client, Disconnected, Told, values_of
from .log_client import connected

DEADLINE_S = 10.0
_STATISTICS_REQUESTS = 200
_LOOK_S = 0.5


class Hung(Disconnected):
    """No answer within the deadline."""


class BinaryClient:
    """One connection to one address (host:port) that asks a model with INPUT0 FP32 [1,16], binary both ways.

    It waits `patience_s` for an answer. `parameters` are those of each request.
    """

    def __init__(self, address: str, model: str, *, patience_s: float = DEADLINE_S, **parameters: Any) -> None:
        self._address = address
        self._patience_s = patience_s
        self._socket: socket.socket | None = None
        tensor: dict[str, Any] = {"name": "INPUT0", "shape": [1, 16], "datatype": "FP32"}
        tensor["parameters"] = {"binary_data_size": 64}
        header = json.dumps({"inputs": [tensor], "parameters": {**parameters, "binary_data_output": True}}).encode()
        self._head = (
            f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: {address}\r\n"
            f"Inference-Header-Content-Length: {len(header)}\r\nContent-Length: {len(header) + 64}\r\n\r\n"
        ).encode() + header

    def ask(self, values: list[float], began_s: Callable[[], float] = lambda: 0.0) -> tuple[int, list[float], str]:
        """Status, output and error text. Raises `Disconnected`, or `Hung` when it takes too long.

        Time counts from the call or from `began_s()`, whichever is later.
        """
        called_s = time.monotonic()
        try:
            if self._socket is None:
                host, _, port = self._address.rpartition(":")
                self._socket = socket.create_connection((host, int(port)), DEADLINE_S)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(self._head + struct.pack("<16f", *values))
            head, body = self._read(self._socket, lambda: max(called_s, began_s()) + self._patience_s)
        except TimeoutError:
            self.close()
            raise Hung(f"no answer within {self._patience_s:.0f} s") from None
        except (OSError, ValueError, EOFError) as error:
            self.close()
            raise Disconnected(f"{type(error).__name__}: {error}") from None
        status = int(head[0].split()[1])
        if status != 200:
            return status, [], body.decode(errors="replace")
        return status, list(struct.unpack("<16f", body[-64:])), ""

    @staticmethod
    def _read(connection: socket.socket, give_up_s: Callable[[], float]) -> tuple[list[str], bytes]:
        data = b""
        size = -1
        connection.settimeout(_LOOK_S)
        while size < 0 or len(data) < size:
            try:
                received = connection.recv(65_536)
            except TimeoutError:
                if time.monotonic() < give_up_s():
                    continue
                raise
            if not received:
                raise EOFError("closed")
            data += received
            if size < 0 and (end := data.find(b"\r\n\r\n") + 4) > 3:
                lines = data[:end].decode().split("\r\n")
                names = {name.lower(): value for name, _, value in (line.partition(":") for line in lines[1:])}
                size = end + int(names["content-length"])
                head = lines, end
        return head[0], data[head[1] :]

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class WaveClient(threading.Thread):
    """Asks one request after the other until `stop` is set; a call that hangs is a problem whatever is killed."""

    def __init__(self, index: int, address: str, model: str, told: Told, stop: threading.Event) -> None:
        super().__init__(name=f"client {index}", daemon=True)
        self._index = index
        self._client = BinaryClient(address, model)
        self._told = told
        self._stop_wanted = stop

    def run(self) -> None:
        count = 0
        while not self._stop_wanted.is_set():
            count += 1
            self._call(values_of(self._index, count))
        self._client.close()

    def _call(self, values: list[float]) -> None:
        told = self._told
        began_s = time.monotonic()
        told.count("waves: requests sent")
        try:
            # who waits through several kills, one after the other, waits for all of them
            status, answer, text = self._client.ask(values, lambda: told.calm_since_s)
        except Disconnected as error:
            if isinstance(error, Hung) or not told.is_excused(began_s):
                told.problem(f"a request in a wave had no answer after {time.monotonic() - began_s:.1f} s: {error}")
            told.count("waves: requests cut off")
            time.sleep(RETRY_S)
            return
        if status == 200:
            if answer != values:
                told.problem(f"a request in a wave was given {answer[:4]}, expected {values[:4]}")
            told.count("waves: requests answered")
        elif status == 503 and told.is_excused(began_s):
            told.count("waves: requests with outcome unknown")
            time.sleep(RETRY_S)
        else:
            told.problem(f"a request in a wave got {status}: {text}")


def check_statistics(address: str, model: str) -> list[str]:
    """A caller who has its answer finds it in the statistics."""

    def counted() -> int:
        _, _, answer = client.ask("GET", f"/v2/models/{model}/stats")
        return int(answer["model_stats"][0]["inference_stats"]["success"]["count"])

    client, binary = Client(address), BinaryClient(address, model)
    try:
        before = counted()
        for number in range(_STATISTICS_REQUESTS):
            status, _, text = binary.ask(values_of(0, number))
            if status != 200:
                return [f"a request after the kills got {status}: {text}"]
        more = counted() - before
    except Disconnected as error:
        return [f"a request after the kills was not answered: {error}"]
    finally:
        client.close()
        binary.close()
    wrong = more != _STATISTICS_REQUESTS
    return [f"statistics count {more} of {_STATISTICS_REQUESTS} requests that were answered"] if wrong else []


def are_riding(log_url: str, model: str, gateways: list[int]) -> bool:
    """Whether one of these gateways, given by their pids, has reserved room for waves of a model. Raises `OSError`."""
    with connected(log_url) as log:
        names = [name.decode() for name in log.ask("HKEYS", f"n:{{{model}}}")]
    return any(name.startswith("lease:") and f"-{pid}-" in name for name in names for pid in gateways)


def left_in(log_url: str, gateways: int) -> list[str]:
    """What is in the log that should not be once nothing is asked: sentences, none when all is well."""
    found = []
    with connected(log_url) as log:
        for key in log.keys("q:*"):
            if count := log.ask("XLEN", key):
                found.append(f"{count} entries are left in {key}")
        for key in log.keys("u:*"):
            found.append(f"{log.ask('HLEN', key)} groups of requests are left in {key}")
        for key in log.keys("n:*"):
            fields = log.ask("HGETALL", key)
            counters = {name.decode(): value.decode() for name, value in zip(fields[::2], fields[1::2], strict=True)}
            for name in ("requests", "bytes"):
                if counters.get(name, "0") != "0":
                    found.append(f"{key} counts {counters[name]} {name}")
            leases = {name: value.split(":") for name, value in counters.items() if name.startswith("lease:")}
            for name in leases:
                if not log.ask("EXISTS", f"alive:gateway:{name.partition(':')[2]}"):
                    found.append(f"{key} has {name} of a gateway that is gone")
            if len(leases) > gateways:
                found.append(f"{key} has {len(leases)} leases, there are {gateways} gateways")
            for at, name in enumerate(("leased_requests", "leased_bytes")):
                if (total := sum(int(lease[at]) for lease in leases.values())) != int(counters.get(name, "0")):
                    found.append(f"{key} has leases of {total} and says {name} {counters[name]}")
    return found


def left_behind(directory: Path) -> list[str]:
    """Payloads that are left in the directory that processes share. A killed one's part of it is swept later."""
    files = [
        path for path in directory.rglob("*") if not path.is_dir() and path.name not in ("token", "replies", "slots")
    ]
    return [f"{path.relative_to(directory)} was left in the directory of payloads" for path in files]
