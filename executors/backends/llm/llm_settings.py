"""The parameters of a language model: those of a model's configuration, else of `--backend-config=llm,...`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from charonia.backend import InstanceSpec, ModelSource
from charonia.errors import InvalidArgument
from executors.generation.step_scheduler import SchedulerSettings

from .adapters import CONFIG, WEIGHTS, AdapterNeeds
from .decoder import DecoderSettings

KV_BLOCKS = "charonia.kv_blocks"
KV_MEMORY = "charonia.kv_memory_mb"
KV_PRECISION = "charonia.kv_precision"
ACTIVATIONS = "charonia.activation_precision"
EXACT = "charonia.exact"
PREFIX_CACHE = "charonia.prefix_cache"
ADAPTER_SLOTS = "charonia.adapter_slots"
ADAPTER_RANK = "charonia.adapter_rank"
THREADS = "INFERENCE_NUM_THREADS"
MAX_RUNNING, MAX_TOKENS = "max_num_seqs", "max_num_batched_tokens"
_PRECISIONS = ("f32", "f16", "u8")
_ACTIVATIONS = ("i8", "f32")
_DEFAULT_MEMORY_MB = 1024
_MOST_SLOTS_BY_DEFAULT = 8
_DEFAULT_RANK = 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LlmSettings:
    """How an instance runs: its decoder, and the bounds of its steps."""

    decoder: DecoderSettings
    scheduler: SchedulerSettings

    @staticmethod
    def of(spec: InstanceSpec, context: int, adapters: AdapterNeeds) -> LlmSettings:
        """Read the parameters. `context` is the model's, `adapters` what its adapters need.

        Slots without an adapter that can be read are kept, with a warning: no adapter can be loaded into them. Raises
        `InvalidArgument` for a value that makes no sense.
        """
        source = spec.source
        sharers = max(1, sum(group.count for group in spec.interface.instance_groups if group.kind != "KIND_GPU"))
        cores = len(spec.cores) or max(1, len(os.sched_getaffinity(0)) // sharers)
        slots = source.integer(ADAPTER_SLOTS)
        memory_mb = source.integer(KV_MEMORY)
        decoder = DecoderSettings(
            threads=source.integer(THREADS) or cores,
            context=context,
            blocks=source.integer(KV_BLOCKS) or None,
            memory_bytes=(_DEFAULT_MEMORY_MB if memory_mb is None else memory_mb) << 20,
            precision=_word(source, KV_PRECISION, _PRECISIONS),
            activations=_word(source, ACTIVATIONS, _ACTIVATIONS),
            adapter_slots=min(adapters.count, _MOST_SLOTS_BY_DEFAULT) if slots is None else slots,
            adapter_rank=source.integer(ADAPTER_RANK) or min(adapters.rank or _DEFAULT_RANK, _DEFAULT_RANK),
            adapter_places=adapters.places,
            exact=source.flag(EXACT) is not False,
        )
        if decoder.adapter_slots and not adapters.places:
            _warn_of_empty_slots(source, decoder.adapter_slots, adapters.count)
        usual = SchedulerSettings()
        running = source.integer(MAX_RUNNING) or usual.max_num_seqs
        return LlmSettings(
            decoder,
            SchedulerSettings(
                max_num_seqs=running,
                max_num_batched_tokens=source.integer(MAX_TOKENS) or max(usual.max_num_batched_tokens, 2 * running),
                prefix_cache=source.flag(PREFIX_CACHE) is not False,
            ),
        )


def _warn_of_empty_slots(source: ModelSource, slots: int, count: int) -> None:
    found = f"none of its {count} adapters has weights that can be read" if count else "it has no adapters"
    _log.warning(
        "model '%s': parameter '%s' is %d, but %s: no request can use an adapter. Expected is a directory with %s and "
        "%s for each adapter, below 'adapters' of the version or named in multi_lora.json. Add them and load the model "
        "again, or set the parameter to 0",
        *(source.name, ADAPTER_SLOTS, slots, found, CONFIG, WEIGHTS),
    )


def _word(source: ModelSource, name: str, known: Sequence[str]) -> str:
    """One of the known words; the first where the parameter is absent."""
    said = (source.parameter(name) or known[0]).lower()
    if said not in known:
        raise InvalidArgument(f"parameter '{name}' of '{source.name}' must be {', '.join(known)}, got '{said}'")
    return said
