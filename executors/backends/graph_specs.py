"""Which shapes of a model have a CUDA graph: those of `optimization.cuda.graph_spec`, else the usual batch sizes. Pure.

A graph runs for exactly its shapes. With `graph_lower_bound` it also runs for smaller ones: the instance pads them.
Used by the backends tensorrt and pytorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from charonia.models.config_errors import InstanceError
from protos import model_config_pb2 as pb

Shape = tuple[int, ...]

_SMALL_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Triton's batch sizes for a model without a scheduler that prefers some: graphs help small batches most."""


@dataclass(frozen=True, slots=True)
class GraphShapes:
    """The input shapes of a graph, and the least that it is used for; both with the batch dimension."""

    dims: Mapping[str, Shape]
    least: Mapping[str, Shape]

    @property
    def size(self) -> int:
        """The number of elements of all inputs."""
        return sum(prod(shape) for shape in self.dims.values())

    def takes(self, dims: Mapping[str, Shape]) -> bool:
        """Whether inputs of these shapes may be padded to those of the graph."""
        return all(
            len(found) == len(self.dims[name])
            and all(a <= b <= c for a, b, c in zip(self.least[name], found, self.dims[name], strict=True))
            for name, found in dims.items()
        )


@dataclass(frozen=True, slots=True)
class TakenShapes:
    """What a model takes: its `usual` input shapes, with the batch dimension, and why it does not take others ("" when
    it does). `name` is for errors: "profile 0".
    """

    usual: Mapping[str, Shape]
    refusal: Callable[[Mapping[str, Shape]], str]
    name: str


def graph_shapes(config: pb.ModelConfig, taken: TakenShapes) -> list[GraphShapes]:
    """The graphs that a model wants. Raises `InstanceError` for a `graph_spec` that makes no sense."""
    written = config.optimization.cuda.graph_spec
    if not written:
        sizes = _usual_sizes(config)
        found = [_with_rows(taken, rows) for rows in sizes]
        return [GraphShapes(dims, dims) for dims in found if not taken.refusal(dims)]
    return [_written(config, spec, taken) for spec in written]


def closest_graph(graphs: Sequence[GraphShapes], dims: Mapping[str, Shape]) -> GraphShapes | None:
    """The graph of these shapes, else the smallest that they may be padded to, else None."""
    for graph in graphs:
        if graph.dims == dims:
            return graph
    fitting = [graph for graph in graphs if graph.takes(dims)]
    return min(fitting, key=lambda graph: graph.size) if fitting else None


def _usual_sizes(config: pb.ModelConfig) -> list[int]:
    most = config.max_batch_size
    if most == 0:
        return [0]
    if config.HasField("dynamic_batching"):
        sizes = {1, most, *config.dynamic_batching.preferred_batch_size}
    elif config.sequence_batching.HasField("oldest"):
        sizes = {1, most, *config.sequence_batching.oldest.preferred_batch_size}
    else:
        sizes = {most, *_SMALL_BATCHES}
    return sorted(size for size in sizes if size <= most)


def _with_rows(taken: TakenShapes, rows: int) -> dict[str, Shape]:
    """The usual shapes with so many rows; 0 leaves them."""
    return {name: (rows, *shape[1:]) if rows else shape for name, shape in taken.usual.items()}


def _written(
    config: pb.ModelConfig, spec: pb.ModelOptimizationPolicy.Cuda.GraphSpec, taken: TakenShapes
) -> GraphShapes:
    most, rows = config.max_batch_size, spec.batch_size
    bounded = spec.HasField("graph_lower_bound")
    least_rows = spec.graph_lower_bound.batch_size if bounded else rows
    if most == 0 and (rows or least_rows):
        raise InstanceError("graph spec expects 'batch_size' to be 0 if 'max_batch_size' is 0")
    if most and not (1 <= rows <= most and 1 <= least_rows <= most):
        raise InstanceError(f"graph spec expects 'batch_size' to be >= 1 and <= {most}")
    if least_rows > rows:
        raise InstanceError("graph lower bound spec expects 'batch_size' to be <= graph spec 'batch_size'")
    if not spec.input:
        dims = _with_rows(taken, rows)
        least = _with_rows(taken, least_rows)
    else:
        dims, least = {}, {}
        for name in spec.input:
            if name not in taken.usual:
                raise InstanceError(f"graph spec of model '{config.name}' has a shape for the unknown input '{name}'")
        for name in taken.usual:
            if name not in spec.input:
                raise InstanceError(f"graph spec of model '{config.name}' expects a shape for input '{name}'")
            shape = tuple(spec.input[name].dim)
            low = _least(spec, name, shape) if bounded else shape
            dims[name] = (rows, *shape) if most else shape
            least[name] = (least_rows, *low) if most else low
    refusal = taken.refusal(dims)
    if refusal:
        raise InstanceError(f"graph spec of model '{config.name}' does not fit {taken.name}: {refusal}")
    return GraphShapes(dims, least)


def _least(spec: pb.ModelOptimizationPolicy.Cuda.GraphSpec, name: str, shape: Shape) -> Shape:
    bound = spec.graph_lower_bound
    if name not in bound.input:
        raise InstanceError(f"graph lower bound spec expects shape for input '{name}'")
    low = tuple(bound.input[name].dim)
    if len(low) != len(shape):
        raise InstanceError(f"graph lower bound spec expects to have '{len(shape)} dimensions, got {len(low)}")
    for small, large in zip(low, shape, strict=True):
        if small < 0 or large < 0:
            raise InstanceError(f"graph spec expects input '{name}' to have dimension >= 0")
        if small > large:
            raise InstanceError(f"graph lower bound spec expects input '{name}' to have dimension <= {large}")
    return low
