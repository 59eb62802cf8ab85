"""Configurations as the templates of TensorRT-LLM's backend give them when they are filled in: all their tensors, types
and parameters. Some of what Triton reads in them is odd: commas after blocks, an output that is named twice.
"""

from __future__ import annotations

_SCALAR = "dims: [ 1 ] reshape: { shape: [ ] } optional: true"
_RAGGED = "optional: true allow_ragged_batch: true"
_LIST = f"dims: [ -1 ] {_RAGGED}"
_TABLE = f"dims: [ -1, -1 ] {_RAGGED}"
_ENGINE_INPUTS = {
    "input_ids": f"TYPE_INT32 {_LIST}",
    "encoder_input_features": f"TYPE_FP16 {_TABLE}",
    "input_lengths": "TYPE_INT32 dims: [ 1 ] reshape: { shape: [ ] }",
    "request_output_len": "TYPE_INT32 dims: [ 1 ] reshape: { shape: [ ] }",
    **dict.fromkeys(("draft_input_ids", "decoder_input_ids"), f"TYPE_INT32 {_LIST}"),
    "draft_logits": f"TYPE_FP32 {_TABLE}",
    **dict.fromkeys(("stop_words_list", "bad_words_list"), f"TYPE_INT32 dims: [ 2, -1 ] {_RAGGED}"),
    "embedding_bias": f"TYPE_FP32 {_LIST}",
    **dict.fromkeys(
        (
            *("encoder_output_lengths", "num_return_sequences", "decoder_input_lengths", "end_id", "pad_id"),
            *("beam_width", "runtime_top_k", "runtime_top_p_reset_ids", "min_tokens", "prompt_vocab_size"),
        ),
        f"TYPE_INT32 {_SCALAR}",
    ),
    **dict.fromkeys(
        (
            *("draft_acceptance_threshold", "temperature", "runtime_top_p", "runtime_top_p_min", "len_penalty"),
            *("runtime_top_p_decay", "repetition_penalty", "beam_search_diversity_rate", "presence_penalty"),
            "frequency_penalty",
        ),
        f"TYPE_FP32 {_SCALAR}",
    ),
    **dict.fromkeys(("seed", "lora_task_id"), f"TYPE_UINT64 {_SCALAR}"),
    **dict.fromkeys(
        (
            *("early_stopping", "return_log_probs", "return_context_logits", "return_generation_logits", "stop"),
            *("return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens", "streaming"),
            "exclude_input_in_output",
        ),
        f"TYPE_BOOL {_SCALAR}",
    ),
    "prompt_embedding_table": f"TYPE_FP16 {_TABLE}",
    "prompt_table_extra_ids": f"TYPE_UINT64 {_LIST}",
    "cross_attention_mask": f"TYPE_BOOL {_TABLE}",
    "mrope_rotary_cos_sin": "TYPE_FP32 dims: [ -1 ] optional: true",
    "mrope_position_deltas": "TYPE_INT64 dims: [ 1 ] optional: true",
    "lora_weights": f"TYPE_FP16 {_TABLE}",
    "lora_config": f"TYPE_INT32 dims: [ -1, 3 ] {_RAGGED}",
    "context_phase_params": f"TYPE_UINT8 {_LIST}",
    "skip_cross_attn_blocks": f"TYPE_BOOL dims: [ 1 ] {_RAGGED}",
    **{
        f"retention_token_range_{name}": f"TYPE_INT32 {_LIST}"
        for name in ("starts", "ends", "priorities", "durations_ms")
    },
    **dict.fromkeys(
        (
            *("retention_decode_priority", "retention_decode_duration_ms", "lookahead_window_size"),
            *("lookahead_ngram_size", "lookahead_verification_set_size"),
        ),
        f"TYPE_INT32 dims: [ 1 ] {_RAGGED}",
    ),
    **dict.fromkeys(("guided_decoding_guide_type", "guided_decoding_guide"), f"TYPE_STRING dims: [ 1 ] {_RAGGED}"),
}
_OUTPUTS = {
    "cum_log_probs": "TYPE_FP32 dims: [ -1 ]",
    "output_log_probs": "TYPE_FP32 dims: [ -1, -1 ]",
    "context_logits": "TYPE_FP32 dims: [ -1, -1 ]",
    "generation_logits": "TYPE_FP32 dims: [ -1, -1, -1 ]",
    **dict.fromkeys(
        (
            *("batch_index", "sequence_index", "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks"),
            *("kv_cache_alloc_total_blocks", "total_accepted_draft_tokens", "total_draft_tokens"),
            *("num_input_tokens", "num_output_tokens"),
        ),
        "TYPE_INT32 dims: [ 1 ]",
    ),
    **dict.fromkeys(
        ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
        "TYPE_INT64 dims: [ 1 ]",
    ),
    "acceptance_rate": "TYPE_FP32 dims: [ 1 ]",
}
_PARAMETERS = {
    "max_beam_width": "1",
    "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
    "gpt_model_type": "inflight_fused_batching",
    "gpt_model_path": "/engines/llama/1-gpu",
    "encoder_model_path": "${encoder_engine_dir}",
    "max_tokens_in_paged_kv_cache": "2560",
    "max_attention_window_size": "${max_attention_window_size}",
    "batch_scheduler_policy": "guaranteed_no_evict",
    "kv_cache_free_gpu_mem_fraction": "0.5",
    "enable_trt_overlap": "${enable_trt_overlap}",
    "exclude_input_in_output": "true",
    "cancellation_check_period_ms": "50",
    "enable_kv_cache_reuse": "false",
    "normalize_log_probs": "${normalize_log_probs}",
    "enable_chunked_context": "true",
    "gpu_device_ids": "${gpu_device_ids}",
    "decoding_mode": "${decoding_mode}",
    "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
    "lora_cache_optimal_adapter_size": "8",
    "medusa_choices": "${medusa_choices}",
}


def _tensors(kind: str, described: dict[str, str]) -> str:
    blocks = ", ".join(f'{{ name: "{name}" data_type: {rest} }}' for name, rest in described.items())
    return f"{kind} [ {blocks} ]\n"


def parameters(values: dict[str, str]) -> str:
    return "".join(
        f'parameters: {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n' for key, value in values.items()
    )


def engine_config(**more: str) -> str:
    """`tensorrt_llm/config.pbtxt`; `more` are parameters."""
    return (
        'name: "tensorrt_llm"\nbackend: "tensorrtllm"\nmax_batch_size: 64\n'
        "model_transaction_policy { decoupled: true }\n"
        "dynamic_batching { preferred_batch_size: [ 64 ] max_queue_delay_microseconds: 0\n"
        "  default_queue_policy: { max_queue_size: 0 } }\n"
        + _tensors("input", _ENGINE_INPUTS)
        + _tensors(
            "output",
            {
                "output_ids": "TYPE_INT32 dims: [ -1, -1 ]",
                "sequence_length": "TYPE_INT32 dims: [ -1 ]",
                **_OUTPUTS,
                "context_phase_params": "TYPE_UINT8 dims: [ -1 ]",
            },
        )
        + "instance_group [ { count: 1 kind : KIND_CPU } ]\n"
        + parameters(_PARAMETERS | more)
    )


def ensemble_config() -> str:
    """An ensemble of this one step, with what the template of `ensemble` has besides: commas, and an output twice."""
    plain = {name: rest.replace("reshape: { shape: [ ] }", "") for name, rest in _ENGINE_INPUTS.items()}
    inputs = {name: plain[name] for name in ("input_ids", "input_lengths", "seed")}
    inputs["max_tokens"] = "TYPE_INT32 dims: [ 1 ]"
    outputs = {"output_ids": "TYPE_INT32 dims: [ -1, -1 ]", **_OUTPUTS}
    twice = _tensors("output", outputs).replace(
        "]\n", ', { name: "batch_index" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
    )
    maps = "\n".join(
        [f'input_map {{ key: "{name}" value: "{name}" }},' for name in ("input_ids", "input_lengths", "seed")]
        + ['input_map { key: "request_output_len", value: "max_tokens" }']
        + [f'output_map {{ key: "{name}" value: "{name}" }},' for name in outputs]
    )
    return (
        'name: "ensemble"\nplatform: "ensemble"\nmax_batch_size: 64\n'
        + _tensors("input", inputs)
        + twice
        + f'ensemble_scheduling {{ step [ {{ model_name: "tensorrt_llm" model_version: -1\n{maps} }} ] }}\n'
    )
