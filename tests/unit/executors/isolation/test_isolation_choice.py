"""Where a model runs: what its parameter, its backend and the options say."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from charonia.backend import Backend, Model, ModelSource
from charonia.errors import InvalidArgument, Unsupported
from charonia.models.config_forms import parse
from executors.isolation import sandbox
from executors.isolation.isolation_choice import isolation_of


class Declares:
    name = "declares"

    def __init__(self, isolation: str | None) -> None:
        if isolation is not None:
            self.isolation = isolation

    async def load(self, source: ModelSource) -> Model:
        raise NotImplementedError


class ByFormat(Declares):
    def isolation_of(self, source: ModelSource) -> str:
        return "sandbox" if source.config.default_model_filename.endswith(".pt") else "none"


def source(parameter: str = "", filename: str = "") -> ModelSource:
    text = f'name: "m" backend: "declares" default_model_filename: "{filename}"'
    if parameter:
        text += f' parameters {{ key: "charonia.isolation" value {{ string_value: "{parameter}" }} }}'
    return ModelSource("m", 1, Path("m"), parse(text))


def chosen(backend: Backend, given: ModelSource, *, require_sandbox: bool = False, movable: bool = True) -> str:
    return isolation_of(given, backend, require_sandbox=require_sandbox, movable=movable)


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "is_available", lambda: True)


@pytest.mark.parametrize(
    ("declared", "parameter", "expected"),
    [
        (None, "", "none"),
        ("process", "", "process"),
        ("sandbox", "", "sandbox"),
        (None, "sandbox", "sandbox"),
        ("sandbox", "process", "process"),
        ("process", "none", "none"),
    ],
)
def test_a_parameter_overrides_the_backend(declared: str | None, parameter: str, expected: str) -> None:
    assert chosen(Declares(declared), source(parameter)) == expected


def test_a_backend_may_say_it_for_each_format() -> None:
    assert chosen(ByFormat("process"), source(filename="model.pt")) == "sandbox"
    assert chosen(ByFormat("process"), source(filename="model.onnx")) == "none"


def test_a_model_cannot_ask_for_less_than_a_required_sandbox() -> None:
    for parameter in ("none", "process"):
        with pytest.raises(Unsupported, match="--require-sandbox forbids less"):
            chosen(Declares("sandbox"), source(parameter), require_sandbox=True)
    assert chosen(Declares("process"), source("none"), require_sandbox=True) == "none"
    assert chosen(Declares("sandbox"), source(), require_sandbox=True) == "sandbox"


def test_without_a_sandbox_models_load_with_a_warning_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sandbox, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert chosen(Declares("sandbox"), source()) == "process"
    assert "model 'm' wants a sandbox, which this kernel does not offer" in caplog.text
    with pytest.raises(Unsupported, match="--require-sandbox forbids to load it without"):
        chosen(Declares("sandbox"), source(), require_sandbox=True)


def test_what_has_processes_of_its_own_stays_where_it_is() -> None:
    assert chosen(Declares("sandbox"), source(), movable=False) == "none"
    assert chosen(Declares(None), source("none"), movable=False) == "none"
    with pytest.raises(Unsupported, match="runs its models in processes of their own already"):
        chosen(Declares(None), source("process"), movable=False)
    with pytest.raises(InvalidArgument, match='must be "none", "process" or "sandbox", got \'jail\''):
        chosen(Declares(None), source("jail"))


def test_machine_code_needs_the_leave_of_the_operator() -> None:
    refused, allowed = source(), ModelSource("m", 1, Path("m"), parse('name: "m"'), native_code=True)
    allowed.check_native_code("'x.so'")
    with pytest.raises(Unsupported, match=r"model 'm' brings machine code: 'x\.so'\. .* with --allow-native-models"):
        refused.check_native_code("'x.so'")


def test_code_needs_a_sandbox_or_the_leave_of_the_operator() -> None:
    replace(source(), isolation="sandbox").check_code("a pickle")
    replace(source(), isolation="process", native_code=True).check_code("a pickle")
    for isolation in ("none", "process"):
        with pytest.raises(
            Unsupported, match=r"model 'm' brings code: a pickle\. It runs in a sandbox .* --allow-native"
        ):
            replace(source(), isolation=isolation).check_code("a pickle")
