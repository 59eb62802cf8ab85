"""Repositories on disk: layout, duplicates, configuration choice, labels, fingerprints and hashes (R1-R11, C6, C73)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from fingerprints import changed_versions

from charonia.errors import InternalError, InvalidArgument, StartupError, Unavailable, Unsupported
from charonia.models.config_forms import parse
from executors.configuration.config import InstanceError, StructureError, normalise
from executors.repository import model_directory as module
from executors.repository.model_directory import content_hash, load_labels
from executors.repository.model_repository import ModelRepository


def _write(path: Path, content: str | bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _model(
    root: Path, name: str = "m", config: str | None = "backend: 'python'", versions: tuple[int, ...] = (1,)
) -> Path:
    for version in versions:
        _write(root / name / str(version) / "model.py", f"# {version}")
    if config is not None:
        _write(root / name / "config.pbtxt", config)
    (root / name).mkdir(parents=True, exist_ok=True)
    return root / name


def _touch_later(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))


def test_layout(tmp_path: Path) -> None:
    _model(tmp_path, "b", versions=(1, 10, 2))
    _write(tmp_path / "b" / "03" / "model.py")
    _write(tmp_path / "b" / "7", "a file, not a version")
    _model(tmp_path, "a", config=None)
    for name in (".hidden", " "):  # no client could name them
        _model(tmp_path, name)
    _write(tmp_path / "README.md", "no model")
    found = ModelRepository([tmp_path]).scan()
    assert list(found) == ["a", "b"]
    assert found["b"].versions == (1, 2, 10)
    assert found["b"].selected_versions() == [10]
    assert found["b"].error is None
    config = found["a"].required_config()
    assert (config.name, config.backend) == ("a", "python")  # no file at all: by the version's files (C73)


@pytest.mark.parametrize("namespacing", [False, True])
def test_names_are_those_of_a_scan(namespacing: bool, tmp_path: Path) -> None:
    roots = [tmp_path / "one", tmp_path / "two"]
    for root, names in zip(roots, (("b", "a", ".hidden"), ("b", "c")), strict=True):
        for name in names:
            _model(root, name)
    repository = ModelRepository(roots, namespacing=namespacing)
    assert repository.names() == tuple(repository.scan())
    assert len(repository.names()) == (4 if namespacing else 3)


def test_a_stamp_changes_with_the_names(tmp_path: Path) -> None:
    _model(tmp_path, "a")
    repository = ModelRepository([tmp_path])
    os.utime(tmp_path, ns=(1, 1))  # not in the same tick as what follows
    before = repository.stamp()
    _write(tmp_path / "a" / "1" / "model.py", "changed")
    assert repository.stamp() == before
    _model(tmp_path, "b")
    assert repository.stamp() != before
    (tmp_path / "a").rename(tmp_path.parent / "gone")
    shutil.rmtree(tmp_path)
    assert repository.stamp() == (0,)


def test_an_empty_repository(tmp_path: Path) -> None:
    assert ModelRepository([tmp_path]).scan() == {}
    assert ModelRepository([tmp_path]).find("m") is None


def test_a_model_without_versions(tmp_path: Path) -> None:
    _model(tmp_path, versions=())
    model = ModelRepository([tmp_path]).scan()["m"]
    with pytest.raises(InstanceError, match="at least one version must be available"):
        model.selected_versions()


def test_one_bad_model_does_not_hide_the_others(tmp_path: Path) -> None:
    _model(tmp_path, "good")
    _model(tmp_path, "syntax", "backend: python")
    _model(tmp_path, "bytes", None)
    (tmp_path / "bytes" / "config.pbtxt").write_bytes(b"name: '\xff'")
    _model(tmp_path, "name", "name: 'other' backend: 'python'")
    _model(tmp_path, "directory", None)
    (tmp_path / "directory" / "config.pbtxt").mkdir()
    found = ModelRepository([tmp_path]).scan()
    assert {name for name, model in found.items() if model.error is None} == {"good"}
    assert all(isinstance(model.error, StructureError) for name, model in found.items() if name != "good")
    assert str(found["syntax"].error).startswith("config.pbtxt:1:10 : ")
    with pytest.raises(StructureError, match="unexpected directory name 'name' for model 'other'"):
        found["name"].required_config()


def test_the_same_name_twice(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    for root in (first, second):
        _model(root, "m")
    _model(second, "n")
    repository = ModelRepository([first, second])
    scanned = repository.scan()
    for model in (scanned["m"], repository.find("m")):
        assert model is not None
        assert model.config is None
        assert isinstance(model.error, Unavailable)
        assert str(model.error) == "model appears in two or more repositories"
    assert scanned["n"].error is None


def test_named_configuration(tmp_path: Path) -> None:
    path = _model(tmp_path, config="backend: 'python' max_batch_size: 1")
    _write(path / "configs" / "big.pbtxt", "backend: 'python' max_batch_size: 64")
    sizes = {
        name: ModelRepository([tmp_path], config_name=name).scan()["m"].required_config().max_batch_size
        for name in (None, "big", "missing")
    }
    assert sizes == {None: 1, "big": 64, "missing": 1}


@pytest.mark.parametrize("name", ["", "..", "a/b"])
def test_bad_configuration_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(StartupError, match="must be a plain file name"):
        ModelRepository([tmp_path], config_name=name)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("missing", "does not exist or is not a directory"),
        ("/missing/a@b", "'/missing/a@b' does not exist or is not a directory"),
        ("http://me:secret@host/models", r"'http://\*\*\*@host/models' does not exist or is not a directory"),
        ("s3://bucket/path", "remote model repositories cannot be used here"),
    ],
)
def test_bad_repositories(path: str, sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        ModelRepository([path])
    with pytest.raises(StartupError, match="no model repository was given"):
        ModelRepository([])


def test_a_repository_that_vanishes_is_not_an_empty_one(tmp_path: Path) -> None:
    root = tmp_path / "r"
    root.mkdir()
    repository = ModelRepository([root])
    root.rmdir()
    with pytest.raises(Unavailable, match="failed to poll model repository"):
        repository.scan()


def test_find_refuses_path_traversal(tmp_path: Path) -> None:
    _model(tmp_path / "inside")
    with pytest.raises(InvalidArgument, match="path traversal"):
        ModelRepository([tmp_path / "inside"]).find("../inside")


LABELLED = "backend: 'python' output { name: 'y' data_type: TYPE_FP32 dims: 2 label_filename: '%s' }"


@pytest.mark.parametrize("text", ["cat\ndog\n", "cat\ndog", "cat\r\ndog\r\n"])
def test_labels(tmp_path: Path, text: str) -> None:
    path = _model(tmp_path, config=LABELLED % "labels/all.txt")
    _write(path / "labels" / "all.txt", text)
    model = ModelRepository([tmp_path]).scan()["m"]
    assert load_labels(path, model.required_config()) == {"y": ("cat", "dog")}


@pytest.mark.parametrize("filename", ["../secret", "/etc/passwd", "link", "folder/../../secret", "."])
def test_labels_outside_the_model(tmp_path: Path, filename: str) -> None:
    path = _model(tmp_path, config=LABELLED % filename)
    _write(tmp_path / "secret", "s")
    (path / "link").symlink_to(tmp_path / "secret")
    (path / "folder").mkdir()
    error = ModelRepository([tmp_path]).scan()["m"].error
    assert isinstance(error, Unsupported)
    assert str(error) == f"label file path '{filename}' for output 'y' in model 'm' is outside model directory"


def test_missing_labels(tmp_path: Path) -> None:
    _model(tmp_path, config=LABELLED % "none.txt")
    error = ModelRepository([tmp_path]).scan()["m"].error
    assert isinstance(error, InternalError)
    path = tmp_path / "m" / "none.txt"
    assert str(error) == f"failed to open text file for read {path}: No such file or directory"


def test_changes_are_seen_by_version(tmp_path: Path) -> None:
    path = _model(tmp_path, config="backend: 'python' version_policy { all { } }", versions=(1, 2, 3))
    _write(path / "labels.txt")
    repository = ModelRepository([tmp_path])

    def changed() -> set[int]:
        nonlocal before
        now = repository.scan()["m"].fingerprint
        found, before = changed_versions(before, now), now
        return found

    before = repository.scan()["m"].fingerprint
    assert changed() == set()
    _touch_later(path / "2" / "model.py")
    assert changed() == {2}
    _write(path / "3" / "weights" / "w.bin")
    assert changed() == {3}
    (path / "3" / "weights" / "w.bin").unlink()
    assert changed() == {3}
    _write(path / "4" / "model.py")
    assert changed() == {4}
    (path / "1" / "model.py").unlink()
    (path / "1").rmdir()
    assert changed() == {1}
    _touch_later(path / "labels.txt")
    assert changed() == {2, 3, 4}
    _touch_later(path / "config.pbtxt")
    assert changed() == {2, 3, 4}
    _write(path / "2" / "__pycache__" / "model.cpython-311.pyc", "running the model is no change")
    _write(path / "2" / ".model.py.swp")
    assert changed() == set()


def test_a_link_that_leads_back_is_walked_once(tmp_path: Path) -> None:
    path = _model(tmp_path)
    (path / "1" / "again").symlink_to(path)
    (path / "1" / "nothing").symlink_to(path / "missing")
    model = ModelRepository([tmp_path]).scan()["m"]
    assert model.error is None
    assert content_hash(path, 1, model.required_config())


def test_override(tmp_path: Path) -> None:
    path = _model(tmp_path, config="broken", versions=(1, 2))
    model = ModelRepository([tmp_path]).scan()["m"]
    assert model.config is None
    override = parse("max_batch_size: 7 version_policy { specific { versions: 1 } }")
    changed = model.with_config(override)
    assert changed.error is None
    assert (changed.required_config().backend, changed.required_config().max_batch_size) == ("python", 7)
    assert changed.selected_versions() == [1]
    assert changed_versions(model.fingerprint, changed.fingerprint) == {1, 2}
    assert changed.with_config(override).fingerprint == changed.fingerprint
    bad = model.with_config(parse("max_batch_size: -1"))
    assert bad.config is None
    assert str(bad.error) == "'max_batch_size' must be non-negative value for m"
    assert (path / "config.pbtxt").read_text() == "broken"


def test_reading_a_directory_under_another_name(tmp_path: Path) -> None:
    path = _model(tmp_path, "temporary-1", config="name: 'm' backend: 'python'")
    model = ModelRepository([tmp_path]).read(path, name="m")
    assert (model.name, model.error, model.required_config().name) == ("m", None, "m")


def _hash(path: Path, version: int = 1, text: str = "name: 'm' backend: 'python'", gpus: int = 0) -> str:
    return content_hash(path, version, normalise(parse(text), gpus=gpus))


def test_content_hash_is_the_same_for_the_same_content(tmp_path: Path) -> None:
    one, two = _model(tmp_path / "1"), _model(tmp_path / "2")
    _touch_later(two / "1" / "model.py")
    assert _hash(one) == _hash(two)
    assert _hash(one, gpus=4) == _hash(two, gpus=0)
    assert _hash(one, text="name: 'm' backend: 'python' max_batch_size: 2") != _hash(one)


@pytest.mark.parametrize(
    ("change", "different"),
    [
        ("1/model.py", True),
        ("1/extra.bin", True),
        ("labels.txt", True),
        ("warmup/data", True),
        ("2/model.py", False),
        ("config.pbtxt", False),
        ("configs/other.pbtxt", False),
        ("1/__pycache__/model.pyc", False),
    ],
)
def test_what_content_hash_covers(tmp_path: Path, change: str, different: bool) -> None:
    path = _model(tmp_path, versions=(1, 2))
    before = _hash(path)
    _touch_later(_write(path / change, "something new"))
    assert (_hash(path) != before) is different


def test_moving_bytes_between_files_changes_the_hash(tmp_path: Path) -> None:
    path = _model(tmp_path)
    first, second = _write(path / "1" / "a", "xy"), _write(path / "1" / "b", "z")
    before = _hash(path)
    first.write_text("x")
    second.write_text("yz")
    assert _hash(path) != before


def test_unchanged_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _model(tmp_path)
    reads: list[str] = []
    real = module._read_digest
    monkeypatch.setattr(module, "_read_digest", lambda file: (reads.append(file.name), real(file))[1])
    first = _hash(path)
    assert reads == ["model.py"]
    assert _hash(path) == first
    assert reads == ["model.py"]
    _touch_later(path / "1" / "model.py")
    assert _hash(path) == first
    assert reads == ["model.py", "model.py"]


# -- namespaces --------------------------------------------------------------------------------------------------------


def _steps(path: Path, *models: str) -> None:
    steps = " ".join(
        f"step {{ model_name: '{model}' model_namespace: '/written' input_map {{ key: 'x' value: 'x{i}' }} "
        f"output_map {{ key: 'y' value: 'x{i + 1}' }} }}"
        for i, model in enumerate(models)
    )
    io = f"input {{ name: 'x0' data_type: TYPE_FP32 dims: 1 }} output {{ name: 'x{len(models)}' dims: 1 }}"
    _write(path / "config.pbtxt", f"platform: 'ensemble' {io} ensemble_scheduling {{ {steps} }}")
    (path / "1").mkdir(exist_ok=True)


def test_models_of_one_name_in_two_namespaces(tmp_path: Path) -> None:
    """R2."""
    first, second = tmp_path / "1", tmp_path / "2"
    for root in (first, second):
        _model(root, "m")
    _model(second, "n")
    repository = ModelRepository([first, second], namespacing=True)
    assert list(repository.scan()) == [f"{first}::m", f"{second}::m", f"{second}::n"]
    assert repository.keys("m") == [f"{first}::m", f"{second}::m"]
    assert repository.keys("n") == [f"{second}::n"]
    assert repository.keys("o") == []
    found = repository.find(f"{second}::m")
    assert found is not None
    assert (found.name, found.namespace, found.key, found.path) == ("m", str(second), f"{second}::m", second / "m")
    assert found.required_config().name == "m"
    for key in ("m", f"{first}::n", f"{tmp_path}::m", "/elsewhere::m"):
        assert repository.find(key) is None


def test_a_repository_that_is_given_twice_is_ambiguous_in_itself(tmp_path: Path) -> None:
    _model(tmp_path / "r", "m")
    (model,) = ModelRepository([tmp_path / "r", tmp_path / "r"], namespacing=True).scan().values()
    assert str(model.error) == "model appears in two or more repositories"


def test_a_path_that_cannot_be_told_from_a_name(tmp_path: Path) -> None:
    (tmp_path / "a::b").mkdir()
    ModelRepository([tmp_path / "a::b"])
    with pytest.raises(StartupError, match="must have another name"):
        ModelRepository([tmp_path / "a::b"], namespacing=True)


def test_an_ensemble_finds_its_own_repositorys_models_first(tmp_path: Path) -> None:
    """C50, R2: its own, else the only one, else none; what it says itself counts for nothing."""
    roots = [tmp_path / name for name in "abc"]
    for root in roots[:2]:
        _model(root, "both")
    _model(roots[1], "one")
    for root in roots:
        _steps(root / "e", "both", "one", "none", "../escape")
    repository = ModelRepository(roots, namespacing=True)

    def namespaces(root: Path) -> list[str]:
        found = repository.find(f"{root}::e")
        assert found is not None
        return [step.model_namespace for step in found.required_config().ensemble_scheduling.step]

    a, b, c = map(str, roots)
    assert namespaces(roots[0]) == [a, b, "", ""]
    assert namespaces(roots[1]) == [b, b, "", ""]
    assert namespaces(roots[2]) == ["", b, "", ""]
    before = repository.scan()
    _model(roots[0], "one")
    after = repository.scan()
    changed = [key for key in before if before[key].fingerprint != after[key].fingerprint]
    assert changed == [f"{a}::e", f"{c}::e"], "an ensemble whose model is another is another"
    assert namespaces(roots[0]) == [a, a, "", ""]
    assert c in after[f"{c}::e"].key


def test_without_namespaces_a_step_has_none(tmp_path: Path) -> None:
    _steps(tmp_path / "e", "m")
    found = ModelRepository([tmp_path]).find("e")
    assert found is not None
    (step,) = found.required_config().ensemble_scheduling.step
    assert step.model_namespace == ""
