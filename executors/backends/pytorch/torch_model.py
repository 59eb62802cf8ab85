"""The backend, and one load of a model's version: what its instances share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from charonia.backend import (
    Backend,
    Format,
    GraphSignature,
    InstanceSpec,
    Isolation,
    MemoryUse,
    Model,
    ModelSource,
    TensorSignature,
    Wants,
)
from charonia.errors import Unsupported
from executors.backends.graph_specs import GraphShapes
from executors.configuration.autofill import check_against_graph
from executors.host.host_policy import thread_on

from .cuda_graphs import CapturedRuns, wanted_graphs
from .model_archives import CODE, Form, ProgramText, model_file, read_program
from .padding import rows_taken
from .tensor_names import check_tensors, input_names, names_of_leaf, output_names, positions
from .torch_instance import TorchInstance
from .torch_programs import LOADING, Program, library, load_program
from .torch_settings import TorchSettings, set_process_switches


class PyTorchBackend(Backend):
    """The backend `pytorch`; platforms `pytorch_libtorch` and `torch_aoti`."""

    name = "pytorch"
    api = (1, 0)
    formats = (Format("pytorch_libtorch", ("model.pt", "model.pt2")), Format("torch_aoti", ("model.pt2",)))
    requires = (("torch", "charonia[torch]"), ("safetensors", "charonia[torch]"))
    opens_safely = True  # the archive's list of files, and the text of an exported program
    isolation = "sandbox"
    """Importing torch holds the interpreter for a second, and model files of PyTorch are programs."""

    def isolation_of(self, source: ModelSource) -> Isolation:
        """A sandbox, but for code that the operator trusts: classes, which may be compiled, and compiled packages."""
        trusted = source.config.runtime == CODE or source.config.platform == "torch_aoti"
        return "process" if trusted else self.isolation

    def prefers_gpu(self) -> bool:
        """Whether instances of kind AUTO use a GPU: when the installed PyTorch sees one (C8)."""
        with LOADING:
            return bool(library().cuda.is_available())

    async def load(self, source: ModelSource) -> TorchModel:
        """Return the model; its file is read when something asks for it."""
        return TorchModel(source)


class TorchModel(Model):
    """One load of a model's version. Programs without state are shared by the instances of one device."""

    wants: Wants = "device"

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._shared: dict[str, tuple[Program, int]] = {}
        """By device, with the fewest rows that the program takes."""
        self._uses: list[MemoryUse] = []
        """What the weights of all programs take."""

    async def signature(self) -> GraphSignature | None:
        """What an exported program says of its tensors; None for other forms, which do not say it.

        It is read without torch. Raises `CharoniaError` for a file that cannot be read.
        """
        return await asyncio.to_thread(self._signature)

    async def create_instance(self, spec: InstanceSpec) -> TorchInstance:
        """Make an instance. Raises `InvalidArgument` when the configuration does not fit the file, `Unsupported` for
        a device that there is not, and for machine code without the operator's leave.
        """
        return await asyncio.to_thread(self._create, spec)

    async def check_instance(self, spec: InstanceSpec) -> None:
        """Raise what keeps an instance from being made, as far as it is known without torch."""
        await asyncio.to_thread(_planned, spec)

    def memory(self) -> list[MemoryUse]:
        """What the weights and states of its programs take; nothing of compiled packages, which do not say it."""
        with LOADING:
            return list(self._uses)

    async def close(self) -> None:
        """Release the programs. Their memory is freed when the last instance that uses one is closed."""
        with LOADING:
            self._shared.clear()

    def _signature(self) -> GraphSignature | None:
        path, form = model_file(self._source)
        return _tensors(self._source, read_program(self._source, path)) if form is Form.PROGRAM else None

    def _create(self, spec: InstanceSpec) -> TorchInstance:
        source = spec.source
        path, form, settings, shapes = _planned(spec)
        if form is Form.PACKAGE:
            source.check_native_code(f"'{path.name}' is {form.value}")
        shared = settings.shares_weights or form in (Form.PROGRAM, Form.PACKAGE)
        with LOADING, thread_on(spec.cores):
            torch = library()
            set_process_switches(torch, source)
            device = _device(torch, spec)
            program, rows = self._shared.get(str(device), (None, 0))
            if program is None:
                program = load_program(torch, source, path, form, settings, device, _runners(spec))
                self._uses += program.memory()
                if form in (Form.PROGRAM, Form.PACKAGE):
                    rows = rows_taken(program, torch, spec, settings, device)
                if shared:
                    self._shared[str(device)] = program, rows
            graphs = CapturedRuns(torch, spec, device, shapes) if shapes else None
            return TorchInstance(torch, spec, program, settings, device, rows, stateless=shared, graphs=graphs)


def _planned(spec: InstanceSpec) -> tuple[Path, Form, TorchSettings, list[GraphShapes]]:
    """The file of an instance, its form, how it runs, and the shapes that it records. Imports no torch."""
    source = spec.source
    path, form = model_file(source)
    check_tensors(source.config)
    if form is Form.PROGRAM:
        check_against_graph(source.config, _tensors(source, read_program(source, path)))
    settings = TorchSettings.of(spec, form)
    return path, form, settings, wanted_graphs(spec, form, settings)


def _runners(spec: InstanceSpec) -> int:
    return max(1, sum(group.count for group in spec.interface.instance_groups if f"KIND_{spec.kind}" == group.kind))


def _device(torch: Any, spec: InstanceSpec) -> Any:
    """The device of an instance; None when the model chooses. Raises `Unsupported` for a GPU that there is not."""
    if spec.kind == "MODEL":
        return None
    if spec.kind == "CPU":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise Unsupported(
            f"model '{spec.source.name}' asks for a GPU instance, but the installed torch sees no CUDA device"
        )
    return torch.device("cuda", spec.device_id)


def _tensors(source: ModelSource, text: ProgramText) -> GraphSignature:
    """The signature, with the names of the configuration where it has names for tensors of the program."""
    inputs = [(argument.names, argument.tensor) for argument in text.inputs if argument.is_tensor]
    outputs = [((*names_of_leaf(a.names[0]), *a.names[1:]), a.tensor) for a in text.outputs]
    return GraphSignature(
        _named(source, inputs, input_names(source.config), "INPUT"),
        _named(source, outputs, output_names(source.config), "OUTPUT"),
    )


def _named(
    source: ModelSource,
    tensors: Sequence[tuple[tuple[str, ...], TensorSignature | None]],
    written: list[str],
    side: str,
) -> tuple[TensorSignature, ...]:
    known = [(f"{side}__{index}", *names) for index, (names, _) in enumerate(tensors)]
    found = dict(zip(positions(written, known, source.name, side.lower()), written, strict=True))
    return tuple(
        TensorSignature(found.get(index, f"{side}__{index}"), tensor.datatype, tensor.dims)
        for index, (_, tensor) in enumerate(tensors)
        if tensor is not None
    )
