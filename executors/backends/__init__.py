"""Backends: the libraries that run models, behind the contract of `charonia.backend`.

May import `repository`, `configuration` and `host`; nothing else of executors imports an accelerator library. Begin
reading at `registry`, then `onnxruntime`.
"""
