"""Turns `sampling_parameters` into arguments of vLLM's `SamplingParams`: types that clients write loosely, and LoRA.

Which parameters there are, and what their values may be, vLLM says; here is what Triton's backend does before. Request
parameters of the `generate` endpoint come as any JSON, so "0.5" and 0.5 are one.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Union, get_args, get_origin

from charonia.errors import InvalidArgument

from .prompt_requests import json_object

_OF_THE_BACKEND = frozenset({"output_kind", "skip_clone", "detokenize", "output_text_buffer_length"})
"""Arguments of vLLM's class that say how this backend gets its tokens."""

TRANSFER = "kv_transfer_params"
"""Says where keys and values of a prompt come from or go to: an object that vLLM's connectors make and read."""

_SCALARS = (bool, int, float, str)
_ON, _OFF = ("true", "1"), ("false", "0")


@dataclass(frozen=True, slots=True)
class SamplingArguments:
    """`lora` is "" for the base model; `structured` are the arguments of `StructuredOutputsParams`."""

    arguments: Mapping[str, Any]
    structured: Mapping[str, Any] | None
    lora: str

    def computing_the_prompt(self) -> SamplingArguments:
        """The same without keys and values of another engine: the run before has taken them from there."""
        extra = dict(self.arguments.get("extra_args") or {})
        if not (extra.get(TRANSFER) or {}).get("do_remote_prefill"):
            return self
        del extra[TRANSFER]
        return replace(self, arguments={**self.arguments, "extra_args": extra or None})


def scalar_kinds(annotations: Mapping[str, Any]) -> dict[str, type]:
    """Of a class's annotations, the fields that are a number, a text or a truth value, None or not."""
    found: dict[str, type] = {}
    for name, annotation in annotations.items():
        parts = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
        kinds = [part for part in parts if part is not type(None)]
        if len(kinds) == 1 and kinds[0] in _SCALARS:
            found[name] = kinds[0]
    return found


def sampling_arguments(text: str, names: Collection[str], kinds: Mapping[str, type]) -> SamplingArguments:
    """Read JSON text ("": none); `names` are the fields of vLLM's class, `kinds` those of one type.

    Raises `InvalidArgument` for text that is no object, unknown names, and values that are not of the type.
    """
    written = json_object(text, "sampling_parameters") if text else {}
    lora = written.pop("lora_name", None)
    if lora is not None and not isinstance(lora, str):
        raise InvalidArgument(f"'lora_name' must be a string, got {lora!r}")
    structured = written.pop("structured_outputs", None)
    if isinstance(structured, str):  # as Triton's clients send it
        structured = json_object(structured, "structured_outputs")
    if structured is not None and not isinstance(structured, dict):
        raise InvalidArgument("'structured_outputs' must be a JSON object")
    transfer = written.pop(TRANSFER, None)
    if transfer is not None:
        extra = written.get("extra_args") or {}
        if not isinstance(transfer, dict) or not isinstance(extra, dict):
            raise InvalidArgument(f"'{TRANSFER}' and 'extra_args' must be JSON objects")
        written["extra_args"] = {**extra, TRANSFER: transfer}  # where vLLM's own servers put it
    arguments: dict[str, Any] = {}
    for name, value in written.items():
        if name not in names or name.startswith("_") or name in _OF_THE_BACKEND:
            raise InvalidArgument(f"Unexpected keyword argument '{name}'")
        arguments[name] = value if value is None or name not in kinds else _scalar(name, value, kinds[name])
    bias = arguments.get("logit_bias")
    if bias is not None:
        arguments["logit_bias"] = _bias(bias)
    return SamplingArguments(arguments, structured, lora or "")


def lora_number(lora: str, loras: Mapping[str, str], *, enabled: bool) -> int:
    """The number that vLLM knows an adapter by, 0 for the base model. Raises `InvalidArgument`, in Triton's words."""
    if not lora:
        return 0
    if not enabled:
        raise InvalidArgument("LoRA feature is not enabled.")
    names = list(loras)
    if lora not in names:
        raise InvalidArgument(f"LoRA {lora} is not supported, we currently support {names}")
    return names.index(lora) + 1


def _scalar(name: str, value: Any, kind: type) -> Any:
    try:
        if kind is bool:
            return _truth(value)
        if kind is str:
            return str(value)
        if kind is int and isinstance(value, float) and not value.is_integer():
            raise ValueError("not an integer")
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"'{name}' must be of type {kind.__name__}, got {value!r}") from None


def _truth(value: Any) -> bool:
    word = str(value).lower()
    if word not in (*_ON, *_OFF):
        raise ValueError("not a truth value")
    return word in _ON


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise InvalidArgument(f"'logit_bias' must be a JSON object, got {value!r}")
    try:
        return {int(token): float(bias) for token, bias in value.items()}
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"'logit_bias' must have token ids and numbers: {error}") from None
