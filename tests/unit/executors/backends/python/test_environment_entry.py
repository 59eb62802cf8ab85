"""How a model process in another environment finds our packages, and no others."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from executors.backends.python import environment_entry
from executors.backends.python.environment_entry import PackagesByName, borrowable


def test_packages_are_found_by_name_alone(tmp_path: Path) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    finder = PackagesByName({"mine": str(tmp_path)})
    found = finder.find_spec("mine")
    assert found is not None
    assert found.origin == str(tmp_path / "mine/__init__.py")
    assert finder.find_spec("theirs") is None
    assert finder.find_spec("mine", ["elsewhere"]) is None, "not what lies within a package"


def test_numpy_is_lent_only_to_its_own_version_of_python() -> None:
    packages = {"ours": {}, "borrowed": {"msgpack": "/a", "numpy": "/b"}, "version": [3, 11]}
    assert borrowable(packages, (3, 11)) == {"msgpack": "/a", "numpy": "/b"}
    assert borrowable(packages, (3, 12)) == {"msgpack": "/a"}


def test_the_entry_stands_alone() -> None:
    tree = ast.parse(Path(environment_entry.__file__).read_text())
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [item.name for item in node.names])
    }
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names


def test_the_models_side_needs_no_more_of_the_server_than_it_brings() -> None:
    """What an environment of its own would have to provide: NumPy and msgpack, which are lent."""
    code = """
import sys
import executors.backends.python.stub.model_process, executors.configuration.autocomplete
files = {name.split(".")[0] for name, module in sys.modules.items() if getattr(module, "__file__", None)}
print(*sorted(files - set(sys.stdlib_module_names) - {"__main__"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    brought = {name for name in done.stdout.split() if not name.startswith(("_", "sitecustomize", "usercustomize"))}
    assert brought == {"charonia", "executors", "msgpack", "numpy"}


def test_a_model_process_needs_no_name_that_python_3_10_has_not() -> None:
    """Environments of models may have that version, the server has a later one."""
    code = """
import asyncio, enum, sys, types, typing
import numpy, msgpack
later = {
    asyncio: ("Runner", "TaskGroup", "timeout", "timeout_at"),
    enum: ("StrEnum", "verify"),
    typing: ("LiteralString", "Never", "NotRequired", "Required", "Self", "Unpack", "assert_never"),
}
for module, names in later.items():
    older = types.ModuleType(module.__name__)
    older.__dict__.update({name: value for name, value in vars(module).items() if name not in names})
    sys.modules[module.__name__] = older
import executors.backends.python.stub.model_process
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
