"""The `pytorch` backend: TorchScript, exported programs, AOTInductor packages, and classes with their weights.

`torch` is imported when a model first needs it: nothing here imports it when it is itself imported. May import
`configuration` and `host`, and `backends.model_files` and `graph_specs`. Begin reading at `torch_model`.
"""

from __future__ import annotations

from .torch_model import PyTorchBackend

__all__ = ["PyTorchBackend"]
