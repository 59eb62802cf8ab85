"""The names of our own in a configuration's map `parameters`, all of which begin with `charonia.`.

A backend may ignore keys that it does not know, as Triton's do, and an executor of an older release does not know
those of a newer one: so a name that none of ours reads keeps no model from loading, but the load warns of it.
"""

from __future__ import annotations

import difflib

from protos.model_config_pb2 import ModelConfig

OURS = "charonia."
STEP_CONDITION = "charonia.step_condition."
"""The beginning of one name for each step of an ensemble."""
KNOWN = frozenset(
    OURS + name
    for name in (
        *("activation_precision", "adapter_changes", "adapter_rank", "adapter_slots", "adapters", "autocast"),
        *("batch_strategy", "cache_inputs", "cache_share_tenants", "cache_ttl_s", "channels_last", "checkpoint_every"),
        *("context", "conversions", "exact", "health_interval_s", "isolation", "job_retention_bytes"),
        *("job_retention_s", "kv_blocks", "kv_memory_mb", "kv_precision", "max_execution_s", "max_load_s"),
        *("moderation_threshold", "openai_task", "own_stream", "pool", "prefix_cache", "prefix_routing"),
        *("record_bytes", "record_days", "record_share", "record_tenants", "repeatable", "require", "resumable"),
        *("target_p99_ms", "text_assets", "tool_format"),
    )
)


def unknown_parameters(config: ModelConfig) -> list[str]:
    """A sentence for each key of `parameters` that begins as ours do and that nothing here reads."""
    keys = sorted(key for key in config.parameters if key.startswith(OURS) and key not in KNOWN)
    return [_sentence(key) for key in keys if not key.startswith(STEP_CONDITION)]


def _sentence(key: str) -> str:
    names = {known.removeprefix(OURS): known for known in sorted(KNOWN)}
    alike = difflib.get_close_matches(key.removeprefix(OURS), names, 1, cutoff=0.75)
    instead = f"; '{names[alike[0]]}' is" if alike else ""
    return f"parameter '{key}' is not known and has no effect{instead}"
