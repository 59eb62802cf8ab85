"""Turns a language model's graph into one whose steps are flat: tokens of many sequences beside each other.

The library's own transformation replaces the states by paged attention. What is added here: logits for chosen places
alone, and the places where adapters add their part (`adapter_sites`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from charonia.errors import InternalError, Unsupported
from executors.backends.openvino.model_reading import reason

from .adapter_sites import Place, Site, add_sites

SAMPLED = "sampled"
MASK = "adapter_mask"
KEY_CACHE, VALUE_CACHE = "key_cache.", "value_cache."
_SINGLE_INPUT = frozenset(("Convert", "Reshape", "Squeeze", "Unsqueeze", "Tanh"))
_WITH_CONSTANT = frozenset(("Add", "Divide", "Multiply", "Subtract"))


@dataclass(frozen=True, slots=True)
class FlatGraph:
    """A graph whose inputs are flat, and where adapters add to it."""

    model: Any
    vocabulary: int
    sites: tuple[Site, ...]


def read_flat(
    core: Any, path: str, *, adapter_columns: int, adapter_places: Collection[Place] | None = None
) -> FlatGraph:
    """Read an IR that keeps its keys and values in states, and make it flat.

    `adapter_columns` are those of all adapter slots together, 0 for a graph without any; `adapter_places` as in
    `add_sites`. Raises `Unsupported` for a
    graph that is no such model, `InternalError` with OpenVINO's message.
    """
    try:
        from openvino._offline_transformations import paged_attention_transformation
    except ImportError as error:
        raise InternalError(f"this OpenVINO has no paged attention for CPUs: {error}") from None
    try:
        model = core.read_model(path)
        names = {name for node in model.inputs for name in node.names}
        if "input_ids" not in names or not model.get_sinks():
            raise Unsupported(
                f"'{path}' is no language model with states: it needs an input 'input_ids' and keys and values as "
                "states (exported with `--task text-generation-with-past`)"
            )
        paged_attention_transformation(model)
        sites = add_sites(model, MASK, adapter_columns, adapter_places) if adapter_columns else ()
        vocabulary = _gather(model)
        model.validate_nodes_and_infer_types()
    except RuntimeError as error:
        raise InternalError(f"openvino error: {reason(error)}") from None
    return FlatGraph(model, vocabulary, sites)


def _gather(model: Any) -> int:
    """Compute logits of the places in `sampled` alone; return how many a place has."""
    import openvino
    from openvino import opset13 as ops

    (result,) = (node for node in model.get_results() if "logits" in node.input(0).get_source_output().names)
    vocabulary = result.input(0).get_partial_shape()[-1]
    if vocabulary.is_dynamic:
        raise Unsupported("the model's graph does not say how many logits a token has")
    sampled = ops.parameter([-1], openvino.Type.i32, name=SAMPLED)
    sampled.output(0).get_tensor().set_names({SAMPLED})
    port = _before_head(result)
    # places are along the first dimension: the transformation gives every token a sequence of its own
    gathered = ops.gather(port.get_source_output(), sampled, np.int64(0))
    port.replace_source_output(gathered.output(0))
    model.add_parameters([sampled])
    return int(vocabulary.get_length())


def _before_head(result: Any) -> Any:
    """The input of the last matrix product, or of the result when something else makes the logits."""
    port = result.input(0)
    while True:
        node = port.get_source_output().get_node()
        kind = node.get_type_name()
        if kind == "MatMul":
            return node.input(0)
        constant = kind in _WITH_CONSTANT and _is_constant(node.input(1))
        if kind not in _SINGLE_INPUT and not constant:
            return result.input(0)
        port = node.input(0)


def _is_constant(port: Any) -> bool:
    node = port.get_source_output().get_node()
    while node.get_type_name() == "Convert":
        node = node.input(0).get_source_output().get_node()
    return bool(node.get_type_name() == "Constant")
