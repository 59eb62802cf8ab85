"""The `python` backend: models written as a `TritonPythonModel` class, with one process per instance.

It has two halves that share only `protocol`:

    executor side   python_backend, python_instance, child_process    asyncio; knows the kernel and protobuf
    model side      stub, api                                         blocking; imports little: NumPy, msgpack

The model side runs as `executors.backends.python.stub.model_process`, which imports this package first, so the backend
class is imported lazily. May import `configuration`, `repository` and `host`. Begin reading at `python_backend`.
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
