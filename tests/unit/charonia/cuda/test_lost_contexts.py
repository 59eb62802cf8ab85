from __future__ import annotations

import pytest

from charonia.cuda.cuda_library import CudaError
from charonia.cuda.lost_contexts import is_lost
from charonia.errors import InternalError, InvalidArgument


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other "
        "API call\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=h ; file=f.cc ; line=1 ; "
        "expr=cudaStreamSynchronize(stream);",
        "[executionContext.cpp::execute::1] Error Code 1: Cuda Runtime (unspecified launch failure)",
        "INTERNAL: Failed to synchronize: CUDA_ERROR_MISALIGNED_ADDRESS: misaligned address",
        "CUDA runtime API error cudaErrorIllegalInstruction (715):\nan illegal instruction was encountered",
    ],
)
def test_what_libraries_write_of_a_gpu_that_is_lost(text: str) -> None:
    assert is_lost(RuntimeError(text))
    assert is_lost(InternalError(f"PyTorch execute failure: {text}"))
    assert not is_lost(InvalidArgument(text)), "the text of a request may be in it"


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 20.00 GiB.",
        "CUDA error: invalid argument\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "CUBLAS failure 7: CUBLAS_STATUS_INVALID_VALUE ; GPU=0",
        "misaligned address",
        "",
    ],
)
def test_errors_that_pass(text: str) -> None:
    assert not is_lost(RuntimeError(text))


@pytest.mark.parametrize(("status", "lost"), [(2, False), (0, False), (214, True), (700, True), (719, True)])
def test_the_drivers_own_errors_go_by_their_number(status: int, lost: bool) -> None:
    assert is_lost(CudaError("in the words of any release", status)) is lost
