"""PyTorch on a CPU with a `torch.cuda` whose graphs record operators and run them again on the same memory.

As on a GPU, a graph reads what it was recorded with where it lies, and writes where it wrote; what asks for a value
while it is recorded fails, and so do replays and captures beside a capture.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executors.backends.pytorch.torch_programs import LOADING

_READS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero")


class _Stream:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def wait_stream(self, other: _Stream) -> None:
        self._log.append("wait")

    def synchronize(self) -> None:
        self._log.append("synchronize")


class _Graph(TorchDispatchMode):
    def __init__(self, world: RecordedCuda) -> None:
        super().__init__()
        self._world = world
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _READS:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore of it")
        found = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, found))
        return found

    def replay(self) -> None:
        assert self._world.capturing.acquire(blocking=False), "a replay beside a capture"
        self._world.capturing.release()
        self.replays += 1
        for func, args, kwargs, found in self._calls:
            again = func(*args, **kwargs)
            before = found if isinstance(found, (tuple, list)) else [found]
            after = again if isinstance(again, (tuple, list)) else [again]
            for old, new in zip(before, after, strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class RecordedCuda:
    """Stands for the module torch; `log` is what was asked of streams, `graphs` are all that were recorded."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.graphs: list[_Graph] = []
        self.capturing = threading.Lock()
        current = _Stream(self.log)
        self.cuda = SimpleNamespace(
            Stream=lambda device=None: _Stream(self.log),
            CUDAGraph=self._graph,
            current_stream=lambda device=None: current,
            device=contextlib.nullcontext,
            graph=self._captured,
            graph_pool_handle=lambda: (0, 1),
            stream=contextlib.nullcontext,
            synchronize=lambda device=None: None,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def _graph(self) -> _Graph:
        self.graphs.append(_Graph(self))
        return self.graphs[-1]

    @contextlib.contextmanager
    def _captured(self, graph: _Graph, *, pool: Any, stream: _Stream, capture_error_mode: str) -> Iterator[None]:
        assert self.capturing.acquire(blocking=False), "a capture beside another"
        assert LOADING.locked(), "a capture that another one may come beside"
        try:
            assert (pool, capture_error_mode) == ((0, 1), "thread_local")
            with graph:
                yield
        finally:
            self.capturing.release()
