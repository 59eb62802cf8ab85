"""CUDA graphs of an instance on a GPU: its program's work for some shapes, recorded once and then replayed.

A replay starts hundreds of kernels with one call. It reads and writes the memory that it was recorded with: inputs are
copied there, results are copied from there. Which shapes have a graph is decided as in `graph_specs` (docs/adr/0077).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from charonia.backend import InstanceSpec
from charonia.datatypes import DataType
from charonia.errors import InternalError, InvalidArgument
from charonia.tensors import shape_text
from executors.backends.graph_specs import GraphShapes, Shape, TakenShapes, closest_graph, graph_shapes

from .model_archives import Form
from .tensor_names import leaves
from .torch_settings import COMPILE, TorchSettings, torch_type

_RUNS_BEFORE = 5
"""Libraries choose their algorithms in the first run; TorchScript compiles in its second, kernels in one after that.
Nothing of it is recorded.
"""
_log = logging.getLogger(__name__)


def wanted_graphs(spec: InstanceSpec, form: Form, settings: TorchSettings) -> list[GraphShapes]:
    """The shapes for which an instance is to have graphs; none, with a warning, where graphs change nothing.

    Raises `InstanceError` or `InvalidArgument` for a configuration that no graph can be made of.
    """
    source = spec.source
    if not source.config.optimization.cuda.graphs:
        return []
    without = None
    if spec.kind != "GPU":
        without = "instances that are on no GPU of their own"
    elif form is Form.PACKAGE:
        without = form.value
    elif settings.compile_options is not None:
        without = f"what '{COMPILE}' compiles, which has a mode of its own for it"
    if without is not None:
        _log.warning("model '%s': 'optimization.cuda.graphs' changes nothing for %s", source.name, without)
        return []
    found = graph_shapes(source.config, _taken(spec))
    for shapes in found:
        for name, dims in shapes.dims.items():
            if shapes.least[name][1:] != dims[1:] or (not spec.interface.batching and shapes.least[name] != dims):
                raise InvalidArgument(
                    f"model '{source.name}': a graph of the pytorch backend is padded with rows alone, its lower bound "
                    f"of input '{name}' has to be {shape_text(dims)} but for them"
                )
    return found


def _taken(spec: InstanceSpec) -> TakenShapes:
    inputs, batching, model = spec.interface.inputs, spec.interface.batching, spec.source.name
    for name, item in inputs.items():
        if item.datatype is DataType.BYTES or item.allow_ragged_batch:
            raise InvalidArgument(
                f"model '{model}': input '{name}' holds strings or is ragged, so there can be no CUDA graph; leave "
                "optimization.cuda.graphs out"
            )
        if min(item.backend_dims, default=1) < 0 and not spec.source.config.optimization.cuda.graph_spec:
            raise InvalidArgument(
                f"model '{model}': a CUDA graph is of fixed shapes, and input '{name}' is "
                f"{shape_text(item.backend_dims)}; write the shapes into optimization.cuda.graph_spec"
            )
    usual = {name: (1, *item.backend_dims) if batching else tuple(item.backend_dims) for name, item in inputs.items()}

    def refusal(dims: Mapping[str, Shape]) -> str:
        for name, found in dims.items():
            wanted = usual[name]
            pairs = list(zip(found, wanted, strict=False))[1 if batching else 0 :]
            if len(found) != len(wanted) or any(one < 0 or one != dim >= 0 for one, dim in pairs):
                return f"input '{name}' is {shape_text(wanted)}, not {shape_text(found)}"
        return ""

    return TakenShapes(usual, refusal, "its inputs")


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A graph, and the memory that it reads and writes. `found` are the parts of the program's result, by name."""

    graph: Any
    given: Mapping[str, Any]
    found: Sequence[tuple[str, Any]]


class CapturedRuns:
    """The graphs of one instance. It replays them in its own thread, one at a time, so they share their memory."""

    def __init__(self, torch: Any, spec: InstanceSpec, device: Any, shapes: Sequence[GraphShapes]) -> None:
        self._torch = torch
        self._model = spec.source.name
        self._device = device
        self._dtypes = {name: torch_type(torch, item.datatype) for name, item in spec.interface.inputs.items()}
        # smaller ones find the memory of larger ones free
        self._shapes = sorted(shapes, key=lambda one: one.size, reverse=True)
        self._recorded: list[_Recorded] = []

    def capture(self, run: Callable[[Mapping[str, Any]], Any]) -> None:
        """Record `run`, the program on tensors by their names, for each of the shapes.

        Call it with `LOADING` held: PyTorch captures one graph at a time. Raises `InternalError` for a program that
        cannot be recorded, as one that reads a value from the GPU to go on.
        """
        torch = self._torch
        with torch.cuda.device(self._device):
            stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            for shapes in self._shapes:
                try:
                    self._recorded.append(self._record(run, shapes.dims, stream, pool))
                except Exception as error:
                    text = (str(error).strip() or type(error).__name__).splitlines()[0]
                    dims = ", ".join(f"'{name}' {shape_text(one)}" for name, one in shapes.dims.items())
                    raise InternalError(
                        f"model '{self._model}': its run for {dims} cannot be recorded as a CUDA graph ({text}); leave "
                        "optimization.cuda.graphs out"
                    ) from None

    def replay(self, tensors: Mapping[str, Any]) -> list[tuple[str, Any]] | None:
        """The parts of the program's result for these inputs, in memory of their own; None without a graph for them."""
        shapes = closest_graph(self._shapes, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        if shapes is None:
            return None
        recorded = self._recorded[self._shapes.index(shapes)]
        rows = None
        for name, tensor in tensors.items():
            given = recorded.given[name]
            if given.shape != tensor.shape:
                rows = len(tensor)
                given = given[:rows]
            given.copy_(tensor)
        recorded.graph.replay()
        return [(name, self._own(value, rows)) for name, value in recorded.found]

    def _record(
        self, run: Callable[[Mapping[str, Any]], Any], dims: Mapping[str, Shape], stream: Any, pool: Any
    ) -> Any:
        torch = self._torch
        given = {
            name: torch.zeros(shape, dtype=self._dtypes[name], device=self._device) for name, shape in dims.items()
        }
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_RUNS_BEFORE):
                run(given)
        graph = torch.cuda.CUDAGraph()
        # other threads of the process may use the GPU meanwhile
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            found = list(leaves(run(given)))
        return _Recorded(graph, given, found)

    def _own(self, value: Any, rows: int | None) -> Any:
        """A copy: the next replay writes to the same memory."""
        if not isinstance(value, self._torch.Tensor):
            return value
        return (value if rows is None else value[:rows]).clone()
