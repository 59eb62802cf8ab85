"""One server over the example models for the whole run, and a factory for servers over models of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import build_models
import expected as expected_answers
import inputs
import pytest
from e2e_server import serving


@pytest.fixture(scope="session")
def example_models() -> Path:
    """The example repository of real models, built when it is not there."""
    return build_models.ensure()


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
    return inputs


@pytest.fixture(scope="session")
def expected(example_models: Path, examples: ModuleType) -> ModuleType:
    return expected_answers


@pytest.fixture(scope="session")
def server(example_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server over the example models, shared by tests that only ask."""
    with serving(example_models, tmp_path_factory.mktemp("serve"), "--allow-webhooks=true") as running:
        yield running


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`serve(models, *flags)`: a server of the test's own, stopped at its end."""
    with ExitStack() as stack:
        count = 0

        def start(models: Path, *flags: str) -> Any:
            nonlocal count
            count += 1
            return stack.enter_context(serving(models, tmp_path / f"state{count}", *flags))

        yield start
