"""Recognises errors after which a process can no longer use a GPU, in the errors of every library.

The driver keeps such an error in the device's context: each later call of this process fails with it, whichever library
makes it, until the process ends. What a library makes of an error differs; the driver's own sentence is always in
it, beside a word of CUDA: torch writes "CUDA error: <sentence>", onnxruntime "CUDA failure 700: <sentence>", TensorRT
"Cuda Runtime (<sentence>)", XLA "CUDA_ERROR_ILLEGAL_ADDRESS: <sentence>".
"""

from __future__ import annotations

from charonia.errors import CharoniaError, InternalError

from .cuda_library import CudaError

_SENTENCES = {
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error detected during the execution",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    709: "context is destroyed",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
}
"""By the number that driver and runtime have for them, with the driver's sentence."""
_WORD = "cuda"


def is_lost(error: BaseException) -> bool:
    """Whether an error, met while a model ran on a GPU, means that this process has lost the GPU.

    An error that names something of a request, as `InvalidArgument`, never means it, whatever it says.
    """
    if isinstance(error, CudaError):
        return error.status in _SENTENCES
    if isinstance(error, CharoniaError) and not isinstance(error, InternalError):
        return False
    text = str(error)
    return _WORD in text.lower() and any(sentence in text for sentence in _SENTENCES.values())
