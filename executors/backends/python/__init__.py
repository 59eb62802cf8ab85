"""The `python` backend: models written as a `TritonPythonModel` class, an instance is a process (section 9).

Two halves that share only `frames`, `exchange` and `startup_arguments`:

    executor side   backend, instance, child_process, output     asyncio; knows the kernel and protobuf
    model side      stub, model_host, channel, api/              blocking; imports little: NumPy, msgpack, the frames

The model side runs as `python -m executors.backends.python.stub.model_process`, which imports this package first; so
the backend class is looked up only when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .python_backend import PythonBackend

__all__ = ["PythonBackend"]


def __getattr__(name: str) -> Any:
    if name == "PythonBackend":
        from .python_backend import PythonBackend

        return PythonBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
