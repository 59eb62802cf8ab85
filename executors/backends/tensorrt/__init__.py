"""The `tensorrt` backend: plans of TensorRT, or of TensorRT for RTX, on NVIDIA GPUs.

    pure      engine_tensors    what a plan says of its tensors and profiles, and the configuration made from it
    library   trt_library       the module that reads plans, its messages, and the leave that a plan needs
              plan_model        the backend, and one loaded version with an engine for each GPU
              plan_instance     one instance: its contexts, buffers and graphs

Memory, streams and graphs are `charonia.cuda`'s; batches come in pinned memory (`charonia.exchange`). The driver's
library is searched for before the module is imported, because the import may end a process that has no driver. May
import `configuration` and the neighbours in `backends`. Begin reading at `plan_model`.
"""

from .plan_model import TensorRtBackend

__all__ = ["TensorRtBackend"]
