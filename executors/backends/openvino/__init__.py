"""The backends `openvino` and `tensorflow`: models that OpenVINO reads and runs on CPUs.

    openvino_backend    models and instances: what is compiled, shared and run
    model_reading       a model's file, with the names, types and shapes that the configuration wants
    tensorflow_files    SavedModels and frozen graphs: which signature, which tensors, and what they are called
    compile_properties  parameters of a configuration as the library's properties, pure

The library is imported when a model first needs it. May import `configuration` and `host`. Begin reading at
`openvino_backend`.
"""

from __future__ import annotations

from .openvino_backend import OpenVinoBackend, TensorFlowBackend

__all__ = ["OpenVinoBackend", "TensorFlowBackend"]
