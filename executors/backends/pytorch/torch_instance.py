"""An instance: arrays to tensors, and one execution. Tensors on a GPU are the executor's to fetch, through DLPack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from charonia.backend import InstanceSpec
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument

from .cuda_graphs import CapturedRuns
from .tensor_names import input_names, leaves, names_of_leaf, output_names, positions
from .torch_programs import LOADING, Program
from .torch_settings import TorchSettings, torch_type

_RANK_OF_IMAGES = 4


class TorchInstance:
    """A `BatchInstance` over a program. Batches of fewer than `rows` rows are padded to so many."""

    def __init__(
        self,
        torch: Any,
        spec: InstanceSpec,
        program: Program,
        settings: TorchSettings,
        device: Any,
        rows: int,
        *,
        stateless: bool,
        graphs: CapturedRuns | None = None,
    ) -> None:
        self.stateless = stateless
        config = spec.source.config
        self._torch = torch
        self._program: Program | None = program
        self._model = spec.source.name
        self._settings = settings
        self._device = device
        self._rows = rows
        self._held = program.held()
        names = input_names(config)
        self._places = dict(zip(names, program.locate(names), strict=True))
        self._outputs = output_names(config)
        self._datatypes = {name: output.datatype for name, output in spec.interface.outputs.items()}
        self._found: dict[tuple[str, ...], dict[str, int]] = {}
        self._stream: Any = None
        """Of its GPU; None: PyTorch's default one."""
        self._graphs = graphs
        self._cleans_cache = bool(spec.source.flag("ENABLE_CACHE_CLEANING")) and spec.kind == "GPU"

    def started(self) -> None:
        """Set the number of threads and the GPU, which count for the thread that sets them, make the instance's stream,
        and record its CUDA graphs. Raises `InternalError` for a program that cannot be recorded.
        """
        self._torch.set_num_threads(self._settings.threads)
        if self._device is not None and self._device.type == "cuda":
            self._torch.cuda.set_device(self._device)  # tensors of another one cannot leave through DLPack
        if self._settings.own_stream:
            self._torch.cuda.synchronize(self._device)  # the weights came in the default stream
            self._stream = self._torch.cuda.Stream(self._device)
        if self._graphs is not None:
            with LOADING:
                self._graphs.capture(self._run)

    def execute(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Mapping[str, Any]:
        """Run the program on arrays of NumPy, or of its GPU; return tensors where they are.

        Raises `InvalidArgument` for an output it does not have, `InternalError` with PyTorch's message otherwise.
        """
        if self._program is None:
            raise InternalError(f"an instance of model '{self._model}' was closed")
        rows = len(next(iter(inputs.values()))) if self._rows else 0
        try:
            with ExitStack() as stack:
                self._enter(stack)
                given = {name: self._tensor(name, array) for name, array in inputs.items()}
                found = None if self._graphs is None else self._graphs.replay(given)
                if found is None:
                    found = list(leaves(self._called(given)))
                places = self._places_of(tuple(name for name, _ in found))
                tensors = {name: self._output(name, found[places[name]][1]) for name in outputs if name in places}
                if self._stream is not None:  # who fetches the tensors waits for the default stream
                    self._stream.synchronize()
        except CharoniaError:
            raise
        except Exception as error:
            raise InternalError(f"PyTorch execute failure: {reason(error)}") from None
        finally:
            if self._cleans_cache:
                self._torch.cuda.empty_cache()
        for name in outputs:
            if name not in tensors:
                raise InvalidArgument(f"model '{self._model}' has no output '{name}'")
        return {name: tensor[:rows] for name, tensor in tensors.items()} if rows < self._rows else tensors

    def close(self) -> None:
        """Release the program. Its memory is freed when nothing else uses it."""
        self._program = self._graphs = None

    def _called(self, tensors: Mapping[str, Any]) -> Any:
        assert self._program is not None
        return self._program.call({self._places[name]: tensor for name, tensor in tensors.items()})

    def _run(self, tensors: Mapping[str, Any]) -> Any:
        """Run the program in whatever stream is current."""
        with ExitStack() as stack:
            self._enter_modes(stack)
            return self._called(tensors)

    def _enter(self, stack: ExitStack) -> None:
        if self._stream is not None:
            stack.enter_context(self._torch.cuda.stream(self._stream))
        self._enter_modes(stack)

    def _enter_modes(self, stack: ExitStack) -> None:
        torch, settings = self._torch, self._settings
        stack.enter_context(torch.inference_mode() if settings.inference_mode else torch.no_grad())
        if not settings.optimizes:
            stack.enter_context(torch.jit.optimized_execution(False))
        if settings.autocast is not None:
            kind = "cpu" if self._device is None else self._device.type
            stack.enter_context(torch.autocast(kind, dtype=getattr(torch, settings.autocast)))

    def _places_of(self, leaf_names: tuple[str, ...]) -> dict[str, int]:
        """Where in a result of this structure each configured output is."""
        places = self._found.get(leaf_names)
        if places is None:
            known = [(f"OUTPUT__{index}", *names_of_leaf(name)) for index, name in enumerate(leaf_names)]
            places = dict(zip(self._outputs, positions(self._outputs, known, self._model, "output"), strict=True))
            self._found[leaf_names] = places
        return places

    def _tensor(self, name: str, array: Any) -> Any:
        """A tensor of its own: a model may write to its inputs, and fast operators want them aligned."""
        if array.dtype == np.object_:
            if array.ndim != 1:
                raise InvalidArgument(
                    f"string input '{name}' of model '{self._model}' must have 1 dimension for the pytorch backend, "
                    f"got {array.ndim}"
                )
            try:
                return [element.decode() for element in array.tolist()]
            except UnicodeDecodeError:
                raise InvalidArgument(
                    f"string input '{name}' of model '{self._model}' must be UTF-8 text for the pytorch backend"
                ) from None
        if not isinstance(array, np.ndarray):  # on the GPU, in memory of its own
            shared = self._torch.from_dlpack(array)
        elif array.dtype == DataType.BF16.numpy:
            shared = self._torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(self._torch.bfloat16)
        else:
            shared = self._torch.from_numpy(np.ascontiguousarray(array))
        missing = self._rows - len(array) if self._rows else 0
        if missing > 0:
            shared = self._torch.cat([shared, shared.new_zeros((missing, *shared.shape[1:]))])
        if self._settings.channels_last and shared.dim() == _RANK_OF_IMAGES:
            return shared.clone(memory_format=self._torch.channels_last)
        return shared.clone() if missing <= 0 and isinstance(array, np.ndarray) else shared

    def _output(self, name: str, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list):
            return np.array([element.encode() for element in value], np.object_)
        torch = self._torch
        if not isinstance(value, torch.Tensor):
            raise InvalidArgument(f"output '{name}' of model '{self._model}' is no tensor but {type(value).__name__}")
        configured = self._datatypes.get(name)
        if self._settings.autocast is not None and value.is_floating_point() and configured is not None:
            value = value.to(torch_type(torch, configured))
        if value.untyped_storage().data_ptr() in self._held:
            value = value.clone()
        value = value.detach().resolve_conj().resolve_neg()
        return value.numpy() if value.is_cpu and value.dtype != torch.bfloat16 else value


def reason(error: Exception) -> str:
    """PyTorch's message without the stacks of its own code."""
    text = str(error).strip() or type(error).__name__
    if "The following operation failed in the TorchScript interpreter" in text:
        return text.splitlines()[-1].removeprefix("RuntimeError: ")
    return text.partition("\nException raised from")[0].strip()
