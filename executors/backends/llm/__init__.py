"""The `llm` backend: text of language models in GGUF or OpenVINO's IR, on CPUs.

    llm_backend         models: what is read once, and an engine for each instance
    language_model      the files of a version, and its adapters
    conversion          from GGUF to IR, once; the work is done in `conversion_process`
    gguf_metadata       what a GGUF file says of itself
    gguf_tokenizer      a tokenizer in Hugging Face's form, from that
    llm_settings        the parameters of a configuration
    decoder             the decoder: one pass over tokens of many requests, keys and values in blocks
    graph               a model's graph with flat inputs
    adapter_sites       where adapters (LoRA) add to it
    adapters            the files of adapters
    generation_metrics  what an engine does, as metric families

The libraries are imported when a model first needs them. Engine and sampling are in `executors.generation` and
`charonia.generation`. May import `configuration`, `host`, `executors.generation`, `backends.openvino.model_reading`,
and for metrics `backends.engine_families` and the `python` backend's. Begin reading at `llm_backend`.
"""

from __future__ import annotations

from .llm_backend import LlmBackend

__all__ = ["LlmBackend"]
