"""Modules that are not there: a test that uses something of one is skipped, and says what it misses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar, NoReturn

import pytest


class Missing:
    """A name of a module that is not there. It can be imported, and be a value in a list of parameters."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        pytest.skip(f"needs {self._name}, no server")

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __mro_entries__(self, _bases: tuple[object, ...]) -> tuple[type, ...]:
        return (object,)


class _Module(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = roots

    def find_spec(self, fullname: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in self._roots else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, _module: ModuleType) -> None:
        pass


def stand_for(roots: Sequence[str], **modules: dict[str, Any]) -> None:
    """Let modules of the packages `roots` be imported though nothing is there. `modules` are the real ones, by name
    with `__` for a dot, each with what it has.
    """
    for name, names in modules.items():
        made = _Module(name.replace("__", "."))
        vars(made).update(names)
        sys.modules[made.__name__] = made
    sys.meta_path.insert(0, _Finder(roots))
