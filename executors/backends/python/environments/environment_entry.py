"""The first lines of a model process in an environment of its own: run by path, because nothing of ours is installed.

    <env>/bin/python -I -B environment_entry.py PACKAGES TITLE DESCRIPTOR PARENT BOARD SLOTS

PACKAGES is JSON: where `ours` lie, and those that are `lent` when the environment lacks them. Ours are found by name
alone, so nothing else of the server's site-packages can be imported. msgpack works with any interpreter, its compiled
part or not; NumPy only with the `version` of Python it was built for. Understood by Python 3.10 and later.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_LEAST = (3, 10)


class PackagesByName:
    """Finds some top-level packages, each in the one directory given for it."""

    def __init__(self, directories: Mapping[str, str]) -> None:
        self._directories = directories

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        directory = self._directories.get(name) if path is None else None
        return PathFinder.find_spec(name, [directory], target) if directory is not None else None


def lendable(packages: Mapping[str, Any], version: Sequence[int]) -> dict[str, str]:
    """The lent packages that an interpreter of this version can use."""
    same = list(version) == packages["version"]
    return {name: path for name, path in packages["lent"].items() if same or name != "numpy"}


def main() -> None:
    if sys.version_info < _LEAST:
        sys.exit(f"python models need Python {_LEAST[0]}.{_LEAST[1]} or later, this is {sys.version.split()[0]}")
    packages = json.loads(sys.argv.pop(1))
    # ours before anything, what is lent after everything the environment has
    sys.meta_path.insert(0, PackagesByName(packages["ours"]))
    sys.meta_path.append(PackagesByName(lendable(packages, sys.version_info[:2])))
    try:
        importlib.import_module("numpy")
    except ImportError as error:
        sys.exit(f"the environment {sys.prefix} has no NumPy that works, which python models need: {error}")
    importlib.import_module("executors.backends.python.stub.model_process").main()


if __name__ == "__main__":
    main()
