"""Loads a model file and makes it callable: one class for what has a `forward`, one for what was exported.

Loads run one at a time (`LOADING`): PyTorch's loader of exported programs is not safe for threads, nor are the first
imports of its compiler.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from charonia.backend import MemoryUse, ModelSource
from charonia.errors import CharoniaError, InternalError, InvalidArgument, Unsupported

from .model_archives import Argument, Form, read_program
from .program_check import find_fault
from .tensor_names import Structure, leaves, positions
from .torch_settings import TorchSettings

LOADING = threading.Lock()

_CHECK_INPUTS = "AOTI_RUNTIME_CHECK_INPUTS"
"""Without it a compiled package takes bytes of any type and shape for its own."""
_NUMBERS = {"IntType": int, "FloatType": float, "BoolType": bool, "StringType": str}
_WEIGHTS = ("safetensors", "pt")


def library() -> Any:
    """The module torch. Call it with `LOADING` held."""
    os.environ[_CHECK_INPUTS] = "1"
    torch = importlib.import_module("torch")
    importlib.import_module("torch.export")
    # what is made from a read-only array is copied before anything writes to it
    warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
    return torch


@dataclass(slots=True)
class ModuleProgram:
    """A module with a `forward`: TorchScript, or a class. It may keep state.

    `arguments` are the names of `forward`'s arguments, None when it takes any number; `numbers` those that are no
    tensors, with their types; `optional` those with a default. With `takes_dict` all inputs are one argument.
    """

    module: Any
    model: str
    arguments: tuple[str, ...] | None
    numbers: Mapping[str, Callable[[Any], Any]]
    optional: frozenset[str] = frozenset()
    takes_dict: bool = False

    def locate(self, names: Sequence[str]) -> Sequence[str | int]:
        """What stands for each name in `call`. Raises `InvalidArgument` for names that do not fit."""
        if self.takes_dict:
            return names
        if self.arguments is None:
            return positions(names, [(f"INPUT__{index}",) for index in range(len(names))], self.model, "input")
        known = [(f"INPUT__{index}", name) for index, name in enumerate(self.arguments)]
        found = [self.arguments[index] for index in positions(names, known, self.model, "input")]
        missing = ["/".join(both) for both in known if both[1] not in self.optional and both[1] not in found]
        if missing:
            raise InvalidArgument(
                f"model '{self.model}': the configuration has no input for {', '.join(missing)}, which forward needs"
            )
        return found

    def call(self, values: Mapping[str | int, Any]) -> Any:
        """Run it on tensors."""
        if self.takes_dict:
            return self.module(dict(values))
        if self.arguments is None:
            return self.module(*(values[index] for index in range(len(values))))
        return self.module(**{str(name): self._value(str(name), value) for name, value in values.items()})

    def held(self) -> frozenset[int]:
        """Where its weights and state lie: a result there is copied, as the next execution may change it."""
        return _storages((*self.module.parameters(), *self.module.buffers()))

    def memory(self) -> list[MemoryUse]:
        """What its weights and state take."""
        return memory_of((*self.module.parameters(), *self.module.buffers()))

    def _value(self, name: str, value: Any) -> Any:
        if name not in self.numbers:
            return value
        if isinstance(value, list):
            (element,) = value
            return element
        if value.numel() != 1:
            raise InvalidArgument(
                f"model '{self.model}': argument '{name}' of forward is one number, got a tensor of {value.numel()}"
            )
        return self.numbers[name](value.item())


@dataclass(slots=True)
class ArchivedProgram:
    """An exported program or a compiled package: a function of nested arguments. It keeps no state."""

    model: str
    takes: Structure
    arguments: tuple[Argument, ...]
    run: Callable[[Sequence[Any]], Any]
    """Called with all arguments in order, constants included."""
    weights: frozenset[int] = frozenset()
    uses: tuple[MemoryUse, ...] = ()
    """What its weights take; empty for a compiled package, which does not say it."""

    def locate(self, names: Sequence[str]) -> Sequence[str | int]:
        """What stands for each name in `call`. Raises `InvalidArgument` for names that do not fit."""
        tensors = [index for index, argument in enumerate(self.arguments) if argument.is_tensor]
        known = [(f"INPUT__{number}", *self.arguments[index].names) for number, index in enumerate(tensors)]
        found = positions(names, known, self.model, "input")
        if len(found) < len(tensors):
            raise InvalidArgument(
                f"model '{self.model}': the configuration has {len(found)} inputs, the file takes {len(tensors)}: "
                f"{', '.join('/'.join(group) for group in known)}"
            )
        return [tensors[index] for index in found]

    def call(self, values: Mapping[str | int, Any]) -> Any:
        """Run it on tensors."""
        return self.run([values.get(index, argument.constant) for index, argument in enumerate(self.arguments)])

    def held(self) -> frozenset[int]:
        """Where its weights lie; see `ModuleProgram.held`."""
        return self.weights

    def memory(self) -> list[MemoryUse]:
        """What its weights take."""
        return list(self.uses)


Program = ModuleProgram | ArchivedProgram


def load_program(
    torch: Any, source: ModelSource, path: Path, form: Form, settings: TorchSettings, device: Any, runners: int
) -> Program:
    """Load a file. Call it with `LOADING` held. Raises a `CharoniaError` with the reason.

    `runners` instances run a compiled package at the same time. `device` is None for a model that chooses its own.
    """
    try:
        if form is Form.SCRIPT:
            return _script(torch, source, path, settings, device)
        if form is Form.CODE:
            return _class(torch, source, path, settings, device)
        if form is Form.PROGRAM:
            return _exported(torch, source, path, device)
        return _package(source, path, device, runners)
    except CharoniaError:
        raise
    except Exception as error:
        raise InternalError(f"failed to load model '{source.name}': {type(error).__name__}: {error}") from None


def _script(torch: Any, source: ModelSource, path: Path, settings: TorchSettings, device: Any) -> ModuleProgram:
    with warnings.catch_warnings():
        # it is deprecated in favour of torch.export, and it is what these files are for
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.load(str(path), map_location=device)
    module.eval()
    if settings.channels_last:
        module = module.to(memory_format=torch.channels_last)
    arguments = module.forward.schema.arguments[1:]
    kinds = {argument.name: argument.type.kind() for argument in arguments}
    return ModuleProgram(
        module,
        source.name,
        tuple(kinds),
        {name: _NUMBERS[kind] for name, kind in kinds.items() if kind in _NUMBERS},
        frozenset(argument.name for argument in arguments if argument.has_default_value()),
        takes_dict=list(kinds.values()) == ["DictType"],
    )


def _class(torch: Any, source: ModelSource, path: Path, settings: TorchSettings, device: Any) -> ModuleProgram:
    module = _instantiated(torch, source, path)
    weights = next((file for suffix in _WEIGHTS if (file := path.with_suffix(f".{suffix}")).is_file()), None)
    if weights is not None:
        module.load_state_dict(_state_of(torch, weights))
    module.eval()
    if device is not None:
        module = module.to(device)
    if settings.channels_last:
        module = module.to(memory_format=torch.channels_last)
    parameters = inspect.signature(module.forward).parameters.values()
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    any_number = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    optional = frozenset(each.name for each in parameters if each.default is not each.empty)
    program = ModuleProgram(module, source.name, None if any_number else tuple(named), {}, optional)
    if settings.compile_options is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of PyTorch's own TorchScript
            importlib.import_module("torch._inductor.compile_fx")  # its first import is not safe for threads
        program.module = torch.compile(module, **settings.compile_options)
    return program


def _instantiated(torch: Any, source: ModelSource, path: Path) -> Any:
    module = _imported(source, path)
    classes = [
        value
        for _, value in sorted(vars(module).items())
        if isinstance(value, type) and issubclass(value, torch.nn.Module) and value.__module__ == module.__name__
    ]
    # parts of the model are classes too: the model is the one that no other one uses
    top = [each for each in classes if not any(each in _mentioned(other, module) for other in classes if other != each)]
    if len(top) != 1:
        found = ", ".join(each.__name__ for each in top) or "none"
        raise InvalidArgument(
            f"model '{source.name}': '{path.name}' must define one subclass of torch.nn.Module that no other one uses, "
            f"found {found}"
        )
    return top[0]()


def _mentioned(user: type, module: ModuleType) -> list[Any]:
    """The module's own values that the methods and bases of a class name."""
    names = [name for function in vars(user).values() if inspect.isfunction(function) for name in _names(function)]
    return [vars(module)[name] for name in names if name in vars(module)] + list(user.__mro__[1:])


def _names(function: Any) -> Iterable[str]:
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
        yield from code.co_names


def _imported(source: ModelSource, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"charonia_torch_model_{source.name}_{source.version}", path)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"model '{source.name}': '{path.name}' cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _state_of(torch: Any, path: Path) -> Any:
    """The weights of a file. Nothing of it runs: the safe reader refuses all but tensors."""
    if path.suffix == ".pt":
        return torch.load(path, map_location="cpu", weights_only=True)
    from safetensors.torch import load_file

    return load_file(path)


def _exported(torch: Any, source: ModelSource, path: Path, device: Any) -> ArchivedProgram:
    fault = find_fault(path, torch)
    if fault is not None:
        raise InvalidArgument(f"model '{source.name}': '{path.name}' is not loaded, as {fault}")
    text = read_program(source, path)
    program = torch.export.load(str(path))
    if device is not None and device.type != "cpu":
        program = importlib.import_module("torch.export.passes").move_to_device_pass(program, device)
    module = program.module()
    takes = text.takes

    def run(values: Sequence[Any]) -> Any:
        positional, keyword = takes.build(values)
        return module(*positional, **keyword)

    weights = (*program.state_dict.values(), *program.constants.values())
    return ArchivedProgram(source.name, takes, text.inputs, run, _storages(weights), tuple(memory_of(weights)))


def _package(source: ModelSource, path: Path, device: Any, runners: int) -> ArchivedProgram:
    on = "cpu" if device is None else device.type
    index = -1 if device is None or on == "cpu" else device.index
    # the loader itself: the public function opens programs that lie in the same archive, without the check
    loader = importlib.import_module("torch._C._aoti").AOTIModelPackageLoader(str(path), "model", False, runners, index)
    made_for = loader.get_metadata().get("AOTI_DEVICE_KEY", on)
    if device is not None and made_for != on:
        raise Unsupported(f"model '{source.name}': '{path.name}' was compiled for {made_for}, the instance is on {on}")
    takes, gives = map(Structure, loader.get_call_spec())
    arguments = tuple(Argument((name,)) for name in takes.arguments())

    def run(values: Sequence[Any]) -> Any:
        return gives.build(loader.boxed_run(list(values)))

    return ArchivedProgram(source.name, takes, arguments, run)


def _storages(tensors: Iterable[Any]) -> frozenset[int]:
    return frozenset(
        tensor.untyped_storage().data_ptr() for _, tensor in leaves(tuple(tensors)) if _has_storage(tensor)
    )


def memory_of(tensors: Iterable[Any]) -> list[MemoryUse]:
    """What the storages of tensors take, each of them counted once, whatever shares it."""
    found: dict[tuple[Literal["CPU", "GPU"], int], dict[int, int]] = {}
    for _, tensor in leaves(tuple(tensors)):
        if _has_storage(tensor) and tensor.device.type in ("cpu", "cuda"):
            place: tuple[Literal["CPU", "GPU"], int]
            place = ("CPU", 0) if tensor.device.type == "cpu" else ("GPU", tensor.device.index or 0)
            storage = tensor.untyped_storage()
            found.setdefault(place, {})[storage.data_ptr()] = storage.nbytes()
    return [MemoryUse(*place, sum(sizes.values())) for place, sizes in found.items()]


def _has_storage(tensor: Any) -> bool:
    return hasattr(tensor, "untyped_storage")
