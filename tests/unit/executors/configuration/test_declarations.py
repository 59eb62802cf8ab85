"""What backends declare is found without their libraries, and without importing more than a search needs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib import metadata
from types import SimpleNamespace

import pytest

from charonia.backend import ENTRY_POINT_GROUP, FORMATS_ENTRY_POINT_GROUP, Backend, Format
from charonia.models.config_errors import StructureError
from charonia.models.config_forms import parse
from executors.configuration import declarations
from executors.configuration.config import normalise, unsupported_features
from executors.configuration.declarations import Declaration, declared_by
from executors.configuration.platforms import detect_backend


class Trees(Backend):
    name, api = "trees", (1, 0)
    formats = (Format("trees_json", ("trees.json",), cpu_instances=3), Format("trees_text", ("model.dali",)))
    supports = frozenset(("execution_accelerators",))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[str, str], object]]:
    """What other distributions register, by group and name; an exception is raised instead of loaded."""
    registered: dict[tuple[str, str], object] = {
        (ENTRY_POINT_GROUP, "trees"): Trees,
        (FORMATS_ENTRY_POINT_GROUP, "trees"): Trees.formats,
    }

    def load(entry: metadata.EntryPoint) -> object:
        found = registered[entry.group, entry.name]
        if isinstance(found, Exception):
            raise found
        return found

    def entry_points(*, group: str, name: str = "") -> list[metadata.EntryPoint]:
        names = [key[1] for key in registered if key[0] == group and name in ("", key[1])]
        return [metadata.EntryPoint(found, "unused", group) for found in names]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    monkeypatch.setattr(metadata.EntryPoint, "load", load)
    caches = (declarations._installed, declarations._registered_formats)
    for cache in caches:
        cache.cache_clear()
    yield registered
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize(
    ("text", "files", "found"),
    [
        ("platform: 'trees_text'", [], ("trees", "trees_text")),
        ("", ["trees.json"], ("trees", "trees_json")),
        ("", ["model.dali"], ("trees", "trees_text")),  # before Triton's dali, which is not shipped
        ("", ["model.onnx", "trees.json"], ("onnxruntime", "onnxruntime_onnx")),
        ("backend: 'trees'", ["model.dali"], ("trees", "trees_text")),
        ("backend: 'trees' default_model_filename: 'model.dali'", [], ("trees", "trees_text")),
        ("backend: 'trees'", [], ("trees", "trees_json")),
    ],
)
def test_a_model_of_an_installed_backend_is_found(text: str, files: list[str], found: tuple[str, str]) -> None:
    assert detect_backend(parse(text), "m", files) == found


def test_a_pair_that_its_backend_does_not_have_is_refused() -> None:
    with pytest.raises(StructureError, match="unexpected 'platform' and 'backend' pair, got:onnxruntime_onnx, trees"):
        detect_backend(parse("platform: 'onnxruntime_onnx' backend: 'trees'"), "m", [])


def test_defaults_are_those_of_the_format() -> None:
    done = normalise(parse("name: 'm' backend: 'trees' platform: 'trees_json'"))
    assert (done.default_model_filename, done.instance_group[0].count) == ("trees.json", 3)
    done = normalise(parse("name: 'm' backend: 'trees' platform: 'trees_text'"))
    assert (done.default_model_filename, done.instance_group[0].count) == ("model.dali", 1)


def test_parts_of_a_configuration_are_refused_unless_they_are_supported() -> None:
    accelerated = "optimization { execution_accelerators { cpu_execution_accelerator { name: 'a' } } } "
    libraries = "model_operations { op_library_filename: 'l' }"
    config = parse("name: 'm' backend: 'trees' " + accelerated + libraries)
    assert unsupported_features(config) == [
        "'model_operations.op_library_filename' of the backend 'trees' is not supported yet"
    ]


@pytest.mark.parametrize("broken", [ImportError("no library"), "model.x", ("model.x",)])
def test_a_broken_backend_keeps_no_other_model_from_being_found(
    broken: object, installed: dict[tuple[str, str], object], caplog: pytest.LogCaptureFixture
) -> None:
    installed[FORMATS_ENTRY_POINT_GROUP, "broken"] = broken
    assert detect_backend(parse(""), "m", ["trees.json"]) == ("trees", "trees_json")
    assert "the formats of backend 'broken' cannot be read" in caplog.text


def test_a_backend_that_cannot_be_imported_declares_nothing(
    installed: dict[tuple[str, str], object], caplog: pytest.LogCaptureFixture
) -> None:
    installed[ENTRY_POINT_GROUP, "broken"] = ImportError("no library")
    assert declared_by("broken") == Declaration()
    assert "backend 'broken' cannot be asked for its formats: ImportError: no library" in caplog.text


@pytest.mark.parametrize("attributes", [{"formats": ("model.onnx",)}, {"supports": {"everything"}}])
def test_a_declaration_of_another_form_is_an_error(attributes: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=r"'formats' must be a tuple|'supports' has everything, of cc_model_filenames"):
        Declaration.of(SimpleNamespace(**attributes))


def test_no_library_is_imported_to_know_every_format() -> None:
    code = """
        import sys
        from executors.configuration.declarations import SHIPPED, declared_by, every_format
        assert {name for name, _ in every_format()} >= set(SHIPPED)
        for name in SHIPPED:
            for module, _ in declared_by(name).requires:
                assert module not in sys.modules, module
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
