"""The entry script of a model process in the model's own environment, run by path because our packages are not there.

    <env>/bin/python -I -B environment_entry.py PACKAGES TITLE DESCRIPTOR PARENT BOARD SLOTS

PACKAGES is JSON: the paths of `ours`, and of packages that may be `borrowed` when the environment lacks them. Ours are
found by name, so nothing else of the server's site-packages can be imported. msgpack works with any interpreter; NumPy
only with the `version` of Python that it was built for. This script works with Python 3.10 and later.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_MIN_VERSION = (3, 10)


class PackagesByName:
    """Finds some top-level packages, each in one directory."""

    def __init__(self, directories: Mapping[str, str]) -> None:
        self._directories = directories

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        directory = self._directories.get(name) if path is None else None
        return PathFinder.find_spec(name, [directory], target) if directory is not None else None


def borrowable(packages: Mapping[str, Any], version: Sequence[int]) -> dict[str, str]:
    """The borrowed packages that an interpreter of this version can use."""
    same = list(version) == packages["version"]
    return {name: path for name, path in packages["borrowed"].items() if same or name != "numpy"}


def main() -> None:
    if sys.version_info < _MIN_VERSION:
        sys.exit(
            f"python models need Python {_MIN_VERSION[0]}.{_MIN_VERSION[1]} or later, this is {sys.version.split()[0]}"
        )
    packages = json.loads(sys.argv.pop(1))
    # our packages come before all others, borrowed ones after those of the environment
    sys.meta_path.insert(0, PackagesByName(packages["ours"]))
    sys.meta_path.append(PackagesByName(borrowable(packages, sys.version_info[:2])))
    try:
        importlib.import_module("numpy")
    except ImportError as error:
        sys.exit(f"the environment {sys.prefix} has no NumPy that works, which python models need: {error}")
    importlib.import_module("executors.backends.python.stub.model_process").main()


if __name__ == "__main__":
    main()
