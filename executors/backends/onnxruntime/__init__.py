"""The backend `onnxruntime`: ONNX models on CPUs and NVIDIA devices.

    onnx_backend         the backend and its models: which sessions there are
    onnx_session         opens a file as a session, and reads the signature of its graph
    onnx_instance        runs arrays in a session
    session_options      a configuration as the library's options of sessions and runs
    execution_providers  a configuration as providers and their options, pure
    library_setup        what all sessions of the process share: threads, an arena
    bound_runs           runs over memory that stays at its place, as CUDA graphs need it

The library is imported when a model first needs it. May import `configuration` and `host`. Begin reading at
`onnx_backend`.
"""

from __future__ import annotations

from .onnx_backend import OnnxRuntimeBackend

__all__ = ["OnnxRuntimeBackend"]
