"""One server over the example models for the whole run, and a factory for servers over models of a test's own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_HERE = Path(__file__).resolve().parent
_EXAMPLES = _HERE.parents[1] / "examples"


def _load(name: str, path: Path) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


server_module = _load("e2e_server", _HERE / "server.py")
_load("e2e_models", _HERE / "models.py")
_load("e2e_asking", _HERE / "asking.py")


@pytest.fixture(scope="session")
def example_models() -> Path:
    """The example repository of real models, built when it is not there."""
    sys.path.insert(0, str(_EXAMPLES))
    build = _load("build_models", _EXAMPLES / "build_models.py")
    return Path(build.ensure())


@pytest.fixture(scope="session")
def few_models(example_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three of the examples, one of them a python model: for tests that start servers, not ask every model."""
    repository = tmp_path_factory.mktemp("few")
    for name in ("identity", "magika", "magika_features"):
        (repository / name).symlink_to(example_models / name)
    return repository


@pytest.fixture(scope="session")
def examples(example_models: Path) -> ModuleType:
    """`examples.inputs`; `expected` and `decode` lie beside it."""
    return _load("inputs", _EXAMPLES / "inputs.py")


@pytest.fixture(scope="session")
def expected(example_models: Path, examples: ModuleType) -> ModuleType:
    return _load("expected", _EXAMPLES / "expected.py")


@pytest.fixture(scope="session")
def server(example_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server over the example models, shared by tests that only ask."""
    with server_module.serving(example_models, tmp_path_factory.mktemp("serve")) as running:
        yield running


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`serve(models, *flags)`: a server of the test's own, stopped at its end."""
    with ExitStack() as stack:
        count = 0

        def start(models: Path, *flags: str) -> Any:
            nonlocal count
            count += 1
            return stack.enter_context(server_module.serving(models, tmp_path / f"state{count}", *flags))

        yield start
