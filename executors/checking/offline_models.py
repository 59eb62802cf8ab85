"""Loads the models of a repository as an executor would, without a log and without running any of their code.

Everything is the executor's own: `ModelRepository`, `Loader`, `Composition`. What differs: a python model's process is
not started (its file is parsed instead), backends other than onnxruntime make no instance, and warm-up requests are
built but not run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from charonia.backend import API, Array, Backend, GraphSignature, InstanceSpec, Model, ModelSource, ReadableModel
from charonia.catalog.catalog import Catalog
from charonia.errors import CharoniaError, InvalidArgument
from charonia.models.config_errors import InstanceError
from charonia.models.interface import ModelInterface
from charonia.models.placement import placement_of
from executors.backends.python.model_environments import ENVIRONMENT
from executors.backends.python.process_settings import BACKEND_DIRECTORY, Limits, code_file, python_based
from executors.backends.registry import BackendRegistry
from executors.configuration.declarations import SHIPPED
from executors.loading.composing_models import Composition
from executors.loading.loader import Loader
from executors.repository.model_directory import ModelDirectory
from executors.repository.model_repository import ModelRepository
from protos.model_config_pb2 import ModelConfig, ModelInstanceGroup

_OPENED = "onnxruntime"
"""The backend whose files are opened: that runs nothing of a model."""

_COMPLETED = re.compile(
    r"must specify '(data_type|dims)'|unknown (source input|target output|input) "
    r"|cannot have empty reshape|has batch size"
)
"""Errors about what auto-complete may set: tensors and the batch size."""

_OF_STEPS = re.compile(
    r"maximum batch size|non-existing (input|output)|is not mapped to any|is inferred from|which has no loaded version"
    r"|must be a BOOL tensor"
)
"""Errors of ensembles about tensors and batch sizes of their steps."""


class _NoInstance:
    """Stands for an instance of a model whose code must not run."""

    stateless = False

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        raise NotImplementedError("a check executes nothing")

    def close(self) -> None:
        """Do nothing: nothing was made."""


class _Unopened:
    """Stands for a model of a backend of another distribution."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    async def signature(self) -> GraphSignature | ModelConfig | None:
        """Return None: nothing is known of the model."""
        return None

    async def create_instance(self, spec: InstanceSpec) -> _NoInstance:
        return _NoInstance()

    async def close(self) -> None:
        """Do nothing: nothing was opened."""


class _ParsedPython(_Unopened):
    """Stands for a python model: parses its file instead of running it."""

    async def signature(self) -> None:
        check_code(self._source)

    async def create_instance(self, spec: InstanceSpec) -> _NoInstance:
        Limits.of(spec.source)
        check_code(spec.source)
        return _NoInstance()


class _Read(_Unopened):
    """Stands for a model that is data: gives its signature, and makes no instance."""

    def __init__(self, source: ModelSource, model: Model) -> None:
        super().__init__(source)
        self._model = model

    async def signature(self) -> GraphSignature | ModelConfig | None:
        return await self._model.signature()

    async def create_instance(self, spec: InstanceSpec) -> _NoInstance:
        if isinstance(self._model, ReadableModel):
            await self._model.check_instance(spec)
        return _NoInstance()

    async def close(self) -> None:
        await self._model.close()


class _Reading(Backend):
    """Stands for a backend that opens its models safely, as it declares."""

    api = API

    def __init__(self, backend: Backend) -> None:
        self.name = backend.name
        self._backend = backend

    async def load(self, source: ModelSource) -> _Read:
        return _Read(source, await self._backend.load(source))


class _Closed(Backend):
    """Stands for a backend that opens no models."""

    api = API

    def __init__(self, name: str) -> None:
        self.name = name

    async def load(self, source: ModelSource) -> _Unopened:
        return _ParsedPython(source) if self.name == "python" else _Unopened(source)


class OfflineBackends(BackendRegistry):
    """The backends, of which only onnxruntime and those that say so open models."""

    def of(self, source: ModelSource) -> Backend:
        """Return the backend of a model, as an executor has it, but one that opens safely also without its library."""
        name = source.config.backend
        if name in SHIPPED and not self.has(name) and python_based(source) is not None:
            return self.get("python")  # the operator has put Triton's own in its place
        return super().of(source)

    def get(self, name: str) -> Backend:
        if name == _OPENED:
            return super().get(name) if self.has(name) else _Closed(name)
        if name == "python":
            return _Closed(name)
        if self.opens(name):
            return _Reading(super().get(name))
        return _Closed(name) if name and self.has(name) else super().get(name)

    def reads(self, name: str) -> bool:
        """Whether files of a backend are read here."""
        return (name == _OPENED and self.has(name)) or self.opens(name)

    def opens(self, name: str) -> bool:
        """Whether a backend reads its models' signatures here, and makes no instance. Those that are shipped need no
        library for it.
        """
        return (name in SHIPPED or (name != "" and self.has(name))) and bool(
            getattr(super().get(name), "opens_safely", False)
        )


def _is_whole(config: ModelConfig) -> bool:
    """Whether nothing is left to complete."""
    tensors = [(item.name, item.data_type, len(item.dims)) for side in (config.input, config.output) for item in side]
    return bool(config.max_batch_size and config.input and config.output) and all(map(all, tensors))


def check_code(source: ModelSource) -> None:
    """Raise `InstanceError` for a python model's file that is missing, no Python, or without `TritonPythonModel`."""
    path = code_file(source)
    if path.suffix != ".py":
        raise InstanceError(f"Model name must end with '.py'. Model name is \"{path.name}\".")
    if not path.is_file():
        raise InstanceError(f"Python model file not found in '{path}'.")
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if ENVIRONMENT in source.config.parameters:
            return  # its own interpreter may know newer syntax
        line = getattr(error, "lineno", None) or 0
        raise InstanceError(f"{path}:{line}: {getattr(error, 'msg', error) or 'nested too deeply'}") from None
    if not _binds(tree, "TritonPythonModel"):
        raise InstanceError(f"Python model file '{path}' defines no class 'TritonPythonModel'")


def completes_itself(source: ModelSource) -> bool:
    """Whether a python model's file has `auto_complete_config`, which may change its configuration at load."""
    try:
        tree = ast.parse(code_file(source).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.FunctionDef) and node.name == "auto_complete_config" for node in ast.walk(tree))


def _binds(tree: ast.Module, name: str) -> bool:
    """Whether a module may bind a name: also by an import of everything, or by a name that is stored anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return True
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = {alias.asname or alias.name for alias in node.names}
            if name in names or "*" in names:
                return True
    return False


@dataclass(slots=True)
class OfflineModels:
    """The models of a repository, each loaded at most once; implements `ModelLoads` for ensembles."""

    repository: ModelRepository
    gpus: int
    assumed_gpus: bool = False
    """Whether these GPUs are another machine's: what would run on them is opened on the CPU."""
    backend_directory: str = ""
    """Where python-based backends are."""
    backends: OfflineBackends = field(default_factory=OfflineBackends)
    directories: dict[str, ModelDirectory] = field(default_factory=dict)
    _interfaces: dict[str, dict[int, ModelInterface]] = field(default_factory=dict)
    _configs: dict[str, ModelConfig] = field(default_factory=dict)
    _failures: dict[str, CharoniaError | None] = field(default_factory=dict)
    _composition: Composition = field(init=False)
    _loader: Loader = field(init=False)

    def __post_init__(self) -> None:
        self.directories = self.repository.scan()
        self._composition = Composition(self)
        settings = {"": {BACKEND_DIRECTORY: self.backend_directory}} if self.backend_directory else {}
        self._loader = Loader(
            self.backends, gpus=self.gpus, auto_complete=True, backend_config=settings, isolates=False
        )

    async def attempt(self, directory: ModelDirectory) -> dict[int, ModelInterface]:
        """Load a directory and let it go. Returns its versions; raises the error that a load would raise."""
        find = await self._composition.prepare(directory)
        versions = directory.selected_versions()
        placement_of(directory.required_config())
        interfaces = {}
        try:
            config = await self._loader.complete(directory, versions, find)
            for version in versions:
                await self._rehearse(directory, version, config)
                interfaces[version] = ModelInterface.of(config)
        finally:
            await self._loader.release(directory.key)
        self._configs[directory.key] = config
        return interfaces

    async def _rehearse(self, directory: ModelDirectory, version: int, config: ModelConfig) -> None:
        """Make the instances of a version and close them."""
        source = self._loader.source(directory, version, config)
        bare = ModelConfig()
        bare.CopyFrom(config)
        bare.ClearField("model_warmup")
        for group in bare.instance_group if self.assumed_gpus else ():
            if group.kind == ModelInstanceGroup.KIND_GPU:
                group.kind = ModelInstanceGroup.KIND_CPU
                group.ClearField("gpus")
        loaded = await self._loader.load(directory, version, bare)
        await loaded.pool.close()
        await self._loader.check_warmups(source)

    async def load(self, model: str, request: None) -> None:
        """Load a model as its files are. Raises its error, also when asked again."""
        if model not in self._failures:
            self._failures[model] = None
            try:
                self._interfaces[model] = await self.attempt(self.directories[model])
            except CharoniaError as error:
                self._failures[model] = error
        if (failure := self._failures[model]) is not None:
            raise failure

    def source(self, directory: ModelDirectory) -> ModelSource:
        """The highest version of a model with a configuration."""
        version = directory.versions[-1] if directory.versions else 0
        return self._loader.source(directory, version, directory.required_config())

    async def graph(self, directory: ModelDirectory) -> GraphSignature | None:
        """The tensors of a model's file, None for a model whose files are not opened. Raises a `CharoniaError`."""
        if directory.required_config().backend != _OPENED:
            return None
        model = await self.backends.get(_OPENED).load(self.source(directory))
        try:
            found = await model.signature()
        finally:
            await model.close()
        return found if isinstance(found, GraphSignature) else None

    def completed_by(self, directory: ModelDirectory, problem: str, seen: frozenset[str] = frozenset()) -> str:
        """What may complete a refused model, or its steps, when it is loaded; "" when nothing may.

        `seen` are the ensembles that have been asked.
        """
        config = directory.config
        if config is None or not directory.versions:
            return ""
        if not config.HasField("ensemble_scheduling"):
            return self._completing(directory) if _COMPLETED.search(problem) else ""
        if directory.key in seen or not _OF_STEPS.search(problem):
            return ""
        steps = {step.model_name for step in config.ensemble_scheduling.step}
        # another step can change nothing of an error that names its models
        steps = {step for step in steps if re.search(rf"(?<![\w.-]){re.escape(step)}(?![\w-])", problem)} or steps
        undecided = sorted(step for step in steps if self._may_differ(step, seen | {directory.key}))
        return f"loading {' and '.join(undecided)}" if undecided else ""

    def _may_differ(self, model: str, seen: frozenset[str]) -> bool:
        """Whether a step's model may have other tensors, or load at all, when its code or file completes it."""
        directory, failure = self.directories.get(model), self._failures.get(model)
        if directory is None or directory.config is None:
            return False
        if failure is not None:
            return bool(self.completed_by(directory, failure.message, seen))
        return bool(self._completing(directory))

    def _completing(self, directory: ModelDirectory) -> str:
        """What completes a configuration at load and was not asked here; "" for nothing."""
        config = directory.required_config()
        if config.backend == "python":
            return "its auto_complete_config" if completes_itself(self.source(directory)) else ""
        if not config.backend or self.backends.reads(config.backend) or _is_whole(config):
            return ""
        return "its file, which was not opened,"

    # -- what `Composition` asks --------------------------------------------------------------------------------------

    def configs(self) -> Mapping[str, ModelConfig]:
        return self._configs

    def interfaces(self, model: str) -> Mapping[int, ModelInterface]:
        return self._interfaces.get(model, {})

    def find_directory(self, model: str) -> ModelDirectory | None:
        return self.directories.get(model)

    def failure(self, model: str) -> CharoniaError | None:
        return self._failures.get(model)

    async def load_underway(self, model: str) -> bool:
        return False

    async def catalog(self) -> Catalog:
        return Catalog()

    def is_underway(self, model: str) -> bool:
        return False

    def is_loading(self, model: str) -> bool:
        return False

    async def load_ended(self, model: str) -> None:
        return

    async def unload(self, model: str) -> None:
        raise InvalidArgument("a check serves nothing")

    async def reload(self, model: str) -> None:
        raise InvalidArgument("a check serves nothing")
