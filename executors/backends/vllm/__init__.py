"""The backend `vllm`: language models that vLLM's AsyncLLM runs, with the interface of Triton's vLLM backend.

    vllm_backend         the model and the creation of its engine
    vllm_instance        requests to the engine and its tokens back; what happens when the engine dies
    engine_arguments     `model.json` and `multi_lora.json`
    completed_tensors    the configuration with the tensors that every such model has
    prompt_requests      the tensors of a request
    sampling_arguments   `sampling_parameters` as arguments of vLLM's classes
    text_responses       what the engine gave as tensors
    stream_records       what responses leave in the log, and how another run goes on after them
    engine_metrics       the engine's statistics as families that begin with `vllm:`

All but `vllm_backend`, `vllm_instance` and `engine_metrics` know nothing of vLLM. The library is imported in the
process of a model only. May import `configuration` and the `python` backend's metrics. Begin reading at `vllm_backend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .vllm_backend import VllmBackend

__all__ = ["VllmBackend"]


def __getattr__(name: str) -> Any:
    if name == "VllmBackend":
        from .vllm_backend import VllmBackend

        return VllmBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
