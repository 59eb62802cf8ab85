"""Where adapters add to a graph: the matrix products with weights, and which of a layer's each is.

A site's product y = x·W becomes y + ((x·A) ∘ mask)·B. A has the columns of all slots beside each other, B their rows,
and a row of the mask has ones in the columns of its token's slot: tokens of several adapters share a step. Each site
costs every step four more nodes, so there are sites only where an adapter has weights (ADR 0079).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from charonia.errors import Unsupported

_CONSTANT_PARTS = frozenset(("Constant", "Convert", "Multiply", "Reshape", "Subtract", "Transpose", "Unsqueeze", "Add"))
_ACTIVATIONS = frozenset(("Swish", "Gelu", "Relu", "SwiGLU"))


Place = tuple[int, str]
"""A layer's number, and a product's name as adapters have it."""


@dataclass(frozen=True, slots=True)
class Site:
    """One product: its layer, its name as adapters have it, and the sizes of x and y. `a`, `b` name its inputs: A
    [inputs, columns] and B [columns, outputs], as kernels read them, which would copy transposed ones in each step.
    """

    layer: int
    module: str
    inputs: int
    outputs: int

    @property
    def a(self) -> str:
        return f"adapter_a.{self.layer}.{self.module}"

    @property
    def b(self) -> str:
        return f"adapter_b.{self.layer}.{self.module}"


def add_sites(model: Any, mask_name: str, columns: int, places: Collection[Place] | None) -> tuple[Site, ...]:
    """Let adapters add to the products of layers at `places`, to all of them when None. `columns` are those of all
    slots together. Without a site the graph has no mask.

    Raises `Unsupported` for a model whose layers are built otherwise than those of llama.
    """
    import openvino
    from openvino import opset13 as ops

    mask = ops.parameter([-1, 1, columns], openvino.Type.f32, name=mask_name)
    mask.output(0).get_tensor().set_names({mask_name})
    added, sites = [mask], []
    for layer, module, product in _products(model):
        if places is not None and (layer, module) not in places:
            continue
        weights = product.input(1).get_partial_shape()
        transposed = product.get_attributes()["transpose_b"]
        outputs, inputs = (weights[0], weights[1]) if transposed else (weights[1], weights[0])
        site = Site(layer, module, int(inputs.get_length()), int(outputs.get_length()))
        a = ops.parameter([site.inputs, columns], openvino.Type.f32, name=site.a)
        b = ops.parameter([columns, site.outputs], openvino.Type.f32, name=site.b)
        for parameter, name in ((a, site.a), (b, site.b)):
            parameter.output(0).get_tensor().set_names({name})
        targets = list(product.output(0).get_target_inputs())
        narrow = ops.matmul(product.input(0).get_source_output(), a, False, False)
        part = ops.matmul(ops.multiply(narrow, mask), b, False, False)
        total = ops.add(product, part)
        for target in targets:
            target.replace_source_output(total.output(0))
        added += [a, b]
        sites.append(site)
    if sites:
        model.add_parameters(added)
    return tuple(sites)


def _products(model: Any) -> Iterator[tuple[int, str, Any]]:
    """(layer, name, node) of the products of all layers, found by how they are connected."""
    attentions = [node for node in model.get_ordered_ops() if node.get_type_name() == "PagedAttentionExtension"]
    for layer, attention in enumerate(attentions):
        found = {name: _above(attention.input(index)) for index, name in enumerate(("q_proj", "k_proj", "v_proj"))}
        found["o_proj"] = output = next(_below(attention))
        gate = next(filter(_feeds_activation, _below(output)), None)
        up = None if gate is None else _beside(gate)
        if gate is None or up is None:
            raise Unsupported("adapters need a model whose layers have gate_proj, up_proj and down_proj")
        found |= {"gate_proj": gate, "up_proj": up, "down_proj": next(_below(up))}
        if len({node.get_friendly_name() for node in found.values()}) != len(found):
            raise Unsupported("adapters need a model with separate q_proj, k_proj and v_proj")
        for name, node in found.items():
            yield layer, name, node


def _beside(product: Any) -> Any:
    """Another product of the same input, or None."""
    for target in product.input(0).get_source_output().get_target_inputs():
        node = target.get_node()
        if node.get_friendly_name() != product.get_friendly_name() and _is_product(node):
            return node
    return None


def _feeds_activation(product: Any) -> bool:
    return any(target.get_node().get_type_name() in _ACTIVATIONS for target in product.output(0).get_target_inputs())


def _above(port: Any) -> Any:
    """The nearest product with weights that a value comes from."""
    left, seen = [port.get_source_output().get_node()], set()
    while left:
        node = left.pop(0)
        if node.get_friendly_name() in seen:
            continue
        seen.add(node.get_friendly_name())
        if _is_product(node):
            return node
        left += [one.get_source_output().get_node() for one in node.inputs()]
    raise Unsupported("adapters need attention whose queries, keys and values come from products with weights")


def _below(node: Any) -> Iterator[Any]:
    """The products with weights that a value goes to, the nearest first. Raises `Unsupported` after the last."""
    left, seen = [node], set()
    while left:
        one = left.pop(0)
        for output in one.outputs():
            for target in output.get_target_inputs():
                found = target.get_node()
                if found.get_friendly_name() in seen:
                    continue
                seen.add(found.get_friendly_name())
                if _is_product(found):
                    yield found
                left.append(found)
    raise Unsupported("adapters need layers that end with products with weights")


def _is_product(node: Any) -> bool:
    """Whether it is a matrix product with constant weights."""
    if node.get_type_name() != "MatMul" or len(node.input(1).get_partial_shape()) != 2:
        return False
    left = [node.input(1).get_source_output().get_node()]
    while left:
        one = left.pop()
        if one.get_type_name() not in _CONSTANT_PARTS:
            return False
        left += [port.get_source_output().get_node() for port in one.inputs()]
    return True
