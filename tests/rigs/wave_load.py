"""Clients whose requests ride in waves: each asks on and on and holds the answer against its own input."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2e_asking import until

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from loadtest.drill.clients import Disconnected, values_of
from loadtest.drill.waves import BinaryClient, left_in

ECHO = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        deeds = {float(array[0, 0]) for array in arrays}
        if -1.0 in deeds:
            os._exit(7)
        while -2.0 in deeds:
            time.sleep(0.01)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for array in arrays]
"""

ECHO_CONFIG = """
max_batch_size: 16
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
instance_group { kind: KIND_CPU count: 1 }
dynamic_batching { }
parameters { key: "charonia.max_execution_s" value { string_value: "2" } }
"""
"""Dies of a request that begins with -1, hangs with one that begins with -2."""

PATIENCE_S = 60.0
"""Halving a wave around a request that hangs takes two seconds and a new process for each of up to seven executions."""
DIES, HANGS = -1.0, -2.0


class WaveLoad:
    """`answers` counts good ones; `failures` are what calls got instead: (status, text), status 0 for no answer."""

    def __init__(self, server: Any, model: str, clients: int = 12) -> None:
        self._server = server
        self._model = model
        self._clients = clients
        self._running = True
        self.answers = 0
        self.wrong: list[tuple[list[float], list[float]]] = []
        self.failures: list[tuple[int, str]] = []
        self.hung = 0

    def _ask(self, index: int) -> None:
        client = BinaryClient(self._server.http, self._model, patience_s=PATIENCE_S)
        count = 0
        while self._running:
            count += 1
            values = values_of(index, count)
            try:
                status, answer, text = client.ask(values)
            except Disconnected as error:
                self.failures.append((0, f"{type(error).__name__}: {error}"))
                continue
            if status != 200:
                self.failures.append((status, text))
            elif answer != values:
                self.wrong.append((values, answer))
            else:
                self.answers += 1
        client.close()

    @contextmanager
    def running(self) -> Iterator[WaveLoad]:
        """The load for the length of a block, which begins once requests ride in waves."""
        threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(self._clients)]
        for thread in threads:
            thread.start()
        try:
            self.until_more(200)
            yield self
        finally:
            self._running = False
            for thread in threads:
                thread.join(60)
        assert self.wrong == []

    def until_more(self, count: int = 100) -> None:
        reached = self.answers + count
        until("requests in waves are answered", lambda: self.answers >= reached)


def is_riding(log: Any, model: str) -> bool:
    """Whether a gateway has reserved room for waves of a model; `log` is a client of redis-py."""
    return any(name.startswith(b"lease:") for name in log.hkeys(f"n:{{{model}}}"))


def until_nothing_left(log_url: Callable[[], str], gateways: int = 1) -> None:
    """Until the log holds nothing of any wave."""
    left: list[str] = []

    def look() -> bool:
        left[:] = left_in(log_url(), gateways)
        return not left

    try:
        until("nothing of waves is left", look)
    except BaseException:
        print(left)
        raise
