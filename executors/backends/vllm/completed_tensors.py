"""Completes the configuration of a model of the `vllm` backend, as the `auto_complete_config` of Triton's does."""

from __future__ import annotations

import json
from collections.abc import Iterable

from charonia.errors import InvalidArgument
from charonia.generation.text_tensors import ADAPTERS_PARAMETER, INPUTS, OUTPUTS, TextTensor
from charonia.models.config_errors import InstanceError
from charonia.models.config_forms import from_json, to_json
from charonia.models.repeatable import RESUMABLE
from executors.configuration.autocomplete import set_max_batch_size, set_model_transaction_policy
from protos.model_config_pb2 import ModelConfig, ModelInstanceGroup

_OF_VLLM = (
    TextTensor("image", "BYTES", (-1,), optional=True),
    TextTensor("embedding_request", "BYTES", (1,), optional=True),
    TextTensor("return_kv_transfer_params", "BOOL", (1,), optional=True, added=True),
)
"""Inputs besides those of every model that generates text."""
_OUTPUTS_OF_VLLM = (TextTensor("kv_transfer_params", "BYTES", (-1,), added=True),)
"""Outputs besides those of every model that generates text: JSON, null in all responses but the last."""

NOT_DECOUPLED = "vLLM Triton backend must be configured to use decoupled model transaction policy"


def completed(written: ModelConfig, adapters: Iterable[str] = ()) -> ModelConfig:
    """Return a copy with the tensors that are not written, the decoupled policy and one instance of KIND_MODEL.

    Its streams are resumable unless it says otherwise, and it names its adapters. What is written stays as it is.
    Raises `InstanceError` for batching, and for a policy that says otherwise.
    """
    document = to_json(written)
    try:
        set_max_batch_size(document, 0)
        set_model_transaction_policy(document, {"decoupled": True})
    except ValueError as error:
        raise InstanceError(str(error)) from None
    done = from_json(document)
    inputs = {item.name for item in done.input}
    for tensor in (*INPUTS, *_OF_VLLM):
        if tensor.name not in inputs:
            done.input.add(name=tensor.name, data_type=_type(tensor), dims=list(tensor.dims), optional=tensor.optional)
    outputs = {item.name for item in done.output}
    for tensor in (*OUTPUTS, *_OUTPUTS_OF_VLLM):
        if tensor.name not in outputs:
            done.output.add(name=tensor.name, data_type=_type(tensor), dims=list(tensor.dims))
    if RESUMABLE not in done.parameters:
        done.parameters[RESUMABLE].string_value = "true"
    names = list(adapters)
    if names and ADAPTERS_PARAMETER not in done.parameters:
        done.parameters[ADAPTERS_PARAMETER].string_value = json.dumps(names)
    if not done.instance_group:
        # the engine itself decides which devices it uses
        done.instance_group.add(kind=ModelInstanceGroup.KIND_MODEL, count=1)
    return done


def check_policy(config: ModelConfig) -> None:
    """Raises `InvalidArgument` for a configuration with which no engine can be used, also without auto-complete."""
    if not config.model_transaction_policy.decoupled:
        raise InvalidArgument(NOT_DECOUPLED)
    if config.max_batch_size > 0:
        raise InvalidArgument(f"model '{config.name}': vLLM batches requests itself, 'max_batch_size' must be 0")


def _type(tensor: TextTensor) -> str:
    return "TYPE_STRING" if tensor.datatype == "BYTES" else f"TYPE_{tensor.datatype}"
