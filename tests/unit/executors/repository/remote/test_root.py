"""A remote repository among others: its layout and fingerprints, what is fetched when, and when it is away (R1-R11)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fingerprints import changed_versions
from memory_store import MemoryStore

from charonia.errors import StartupError, Unavailable
from charonia.models.config_errors import StructureError
from executors.repository.model_directory import Fingerprint, ModelDirectory
from executors.repository.model_repository import ModelRepository
from executors.repository.remote import root as module
from executors.repository.remote.copies import Copies
from executors.repository.remote.root import RemoteRoot
from executors.repository.remote.store import RemoteObject

URL = "s3://bucket/models"
CONFIG = 'backend: "python"'
ENSEMBLE = """
platform: "ensemble"
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
ensemble_scheduling { step {
  model_name: "part" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }
} }
"""


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Any]:
    """`remote.repository(*more, ...)` has `remote.store` behind `URL`."""
    store = MemoryStore()
    opened: list[ModelRepository] = []

    def open_remote(url: str, config_name: str | None) -> RemoteRoot:
        return RemoteRoot(url, store, Copies(tmp_path / "copies", url, stay=False), config_name)

    def repository(*more: Path, url: str = URL, **options: Any) -> ModelRepository:
        made = ModelRepository((url, *more), open_remote=open_remote, **options)
        opened.append(made)
        return made

    yield SimpleNamespace(store=store, repository=repository)
    for made in opened:
        made.close()
    assert store.closed


def model(store: MemoryStore, name: str = "m", config: str | None = CONFIG, versions: tuple[int, ...] = (1,)) -> None:
    for version in versions:
        store.put(f"{name}/{version}/model.py", f"version {version}")
    if config is not None:
        store.put(f"{name}/config.pbtxt", config)


def found(repository: ModelRepository, key: str = "m") -> ModelDirectory:
    directory = repository.find(key)
    assert directory is not None
    return directory


def test_the_layout_is_that_of_a_directory(remote: Any) -> None:
    store = remote.store
    model(store, "m", versions=(2, 10))
    for name in (
        "m/01/x",
        "m/README.md",
        "m/0/x",
        "m/-1/x",
        ".hidden/1/model.py",
        "file",
        "empty/",
        "m/3/",
        "../x/1/a",
        " /1/model.py",
    ):
        store.put(name)
    scanned = remote.repository().scan()
    assert list(scanned) == ["empty", "m"]
    assert scanned["m"].versions == (2, 3, 10)
    assert scanned["empty"].versions == ()
    assert scanned["m"].entries == ("model.py",)


def test_looking_fetches_nothing_finding_the_configuration_and_loading_the_chosen_versions(remote: Any) -> None:
    store = remote.store
    model(store, versions=(1, 2, 3))
    store.put("m/labels.txt", "a\nb")
    store.put("n/1/model.onnx", "n")
    repository = remote.repository()
    repository.scan()
    assert store.copied() == []
    directory = found(repository)
    assert directory.required_config().backend == "python"
    assert store.copied() == ["m/config.pbtxt"]
    here = directory.with_files(directory.selected_versions())
    assert store.copied() == ["m/3/model.py", "m/config.pbtxt", "m/labels.txt"]
    assert here.fingerprint == directory.fingerprint
    assert sorted(str(p.relative_to(here.path)) for p in here.path.rglob("*") if p.is_file()) == [
        "3/model.py",
        "config.pbtxt",
        "labels.txt",
    ]
    assert here.with_files([3]) is here
    assert found(repository).with_files([3]).path == here.path
    assert store.copied() == []
    # no configuration is written: the files give the backend away
    assert found(repository, "n").required_config().backend == "onnxruntime"
    assert store.copied() == []


def test_fingerprints_follow_objects_as_they_follow_files(remote: Any) -> None:
    store = remote.store
    model(store, config="", versions=(1, 2))
    repository = remote.repository()

    def fingerprint() -> Fingerprint:
        scanned = repository.scan()["m"].fingerprint
        assert scanned == found(repository).fingerprint
        return scanned

    first = fingerprint()
    assert fingerprint() == first
    store.put("m/.git/x")
    store.put("m/2/__pycache__/x.pyc")
    assert fingerprint() == first
    store.put("m/2/more")
    second = fingerprint()
    assert changed_versions(first, second) == {2}
    store.put("m/3/model.py")
    assert changed_versions(second, fingerprint()) == {3}
    store.put("m/labels.txt")
    third = fingerprint()
    assert changed_versions(second, third) == {1, 2, 3}
    store.put("m/config.pbtxt", "max_batch_size: 2")
    fourth = fingerprint()
    assert (fourth.config != third.config, fourth.shared) == (True, third.shared)
    store.delete("m/config.pbtxt")
    assert fingerprint().config == "missing"


def test_named_configurations(remote: Any) -> None:
    model(remote.store, config="max_batch_size: 1")
    remote.store.put("m/configs/big.pbtxt", "max_batch_size: 64")
    sizes = [found(remote.repository(config_name=name)).required_config().max_batch_size for name in ("big", "none")]
    assert sizes == [64, 1]


def test_bad_configurations_are_the_models_own(remote: Any) -> None:
    model(remote.store, "good")
    model(remote.store, "syntax", "max_batch_size }")
    model(remote.store, "bytes", None)
    remote.store.put("bytes/config.pbtxt", b"name: '\xff'")
    model(remote.store, "labels", CONFIG + ' output { name: "y" label_filename: "../../secret" }')
    repository = remote.repository()
    for name in ("syntax", "bytes"):
        directory = found(repository, name)
        assert directory.config is None
        assert isinstance(directory.error, StructureError)
    assert str(found(repository, "syntax").error).startswith("config.pbtxt:1:")
    labels = found(repository, "labels").with_files([1])
    assert labels.config is None
    assert "outside model directory" in str(labels.error)
    assert found(repository, "good").error is None


def test_no_configuration_is_that_large(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_CONFIG_BYTES", 4)
    model(remote.store, config="max_batch_size: 1")
    assert str(found(remote.repository()).error) == "'config.pbtxt' has 17 bytes: that is no configuration"
    assert remote.store.copied() == []


@pytest.mark.parametrize("sent", [b"max", CONFIG.encode() + b"#" * 100])
def test_a_configuration_is_as_long_as_it_was_listed(remote: Any, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    model(remote.store)
    monkeypatch.setattr(remote.store, "copy", lambda _found, sink: sink.write(sent))
    with pytest.raises(Unavailable, match=r"'config\.pbtxt' (ended after|is larger than)"):
        remote.repository().find("m")


def test_what_a_library_makes_of_nonsense(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model(remote.store)
    repository = remote.repository()
    repository.scan()
    monkeypatch.setattr(remote.store, "copy", lambda _found, _sink: {}["ETag"])
    nonsense = r"^the model repository 's3://bucket/models' cannot be read: its server answers nonsense \(KeyError\)$"
    with pytest.raises(Unavailable, match=nonsense):
        repository.find("m")
    monkeypatch.setattr(remote.store, "objects", lambda _below="": iter([{}["Size"]]))
    assert list(repository.scan()) == ["m"], "what is known stays"
    with pytest.raises(Unavailable, match=nonsense):
        remote.repository().scan()


def test_whether_somebody_waits_for_the_store(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = threading.Event(), threading.Event()

    def objects(_below: str = "") -> Iterator[RemoteObject]:
        asked.set()
        assert answer.wait(60)
        return iter(())

    repository = remote.repository()
    assert not repository.is_waiting
    monkeypatch.setattr(remote.store, "objects", objects)
    thread = threading.Thread(target=repository.scan)
    thread.start()
    assert asked.wait(60)
    repository.abandon()
    assert repository.is_waiting
    answer.set()
    thread.join(60)
    assert not repository.is_waiting


def test_a_bucket_that_was_not_meant(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OBJECTS", 2)
    model(remote.store, versions=(1, 2))
    with pytest.raises(Unavailable, match=r"'s3://bucket/models' cannot be read: it holds more than 2 objects"):
        remote.repository().scan()


def test_a_name_that_can_be_no_file_is_left_out_and_told(remote: Any, caplog: pytest.LogCaptureFixture) -> None:
    model(remote.store)
    for name in ("m/1/../../../evil", "m//etc/passwd", "m/1/" + 300 * "x", "m/1/a\0b"):
        remote.store.put(name, "evil")
    here = found(remote.repository()).with_files([1])
    assert sorted(p.name for p in here.path.rglob("*") if p.is_file()) == ["config.pbtxt", "model.py"]
    assert len([record for record in caplog.records if "can be no file here" in record.getMessage()]) == 4


# -- away --------------------------------------------------------------------------------------------------------------


def test_one_that_cannot_be_read_at_the_start_is_an_error(remote: Any) -> None:
    remote.store.failing = "it is away"
    with pytest.raises(Unavailable, match="it is away"):
        remote.repository().scan()
    with pytest.raises(Unavailable, match="it is away"):
        remote.repository().find("m")


def test_one_that_is_away_for_a_while_changes_nothing_and_is_told_once(
    remote: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = remote.store
    model(store)
    local = tmp_path / "local"
    (local / "here" / "1").mkdir(parents=True)
    (local / "here" / "1" / "model.py").write_text("")
    repository = remote.repository(local)
    repository.scan()
    assert found(repository).with_files([1])
    before = repository.scan()
    store.failing = "it is away"
    for _ in range(3):
        assert repository.scan() == before
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "it is away; what is loaded from it stays"
    ]
    # the other repository goes on; a model of this one cannot be loaded anew
    (local / "new" / "1").mkdir(parents=True)
    assert list(repository.scan()) == ["here", "m", "new"]
    assert found(repository, "here").path == local / "here"
    with pytest.raises(Unavailable, match="it is away"):
        repository.find("m")
    store.failing = ""
    store.delete("m/1/model.py")
    store.delete("m/config.pbtxt")
    assert list(repository.scan()) == ["here", "new"]
    assert "can be read again" in caplog.records[-1].getMessage()


def test_a_path_without_models_is_told(remote: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert remote.repository().scan() == {}
    assert "holds no models: is it the right path?" in caplog.text


def test_files_that_cannot_be_had_are_an_error_of_the_load(remote: Any) -> None:
    model(remote.store)
    directory = found(remote.repository())
    remote.store.put("m/1/model.py", "meanwhile")
    with pytest.raises(Unavailable, match=r"m/1/model\.py changed"):
        directory.with_files([1])


# -- several -----------------------------------------------------------------------------------------------------------


def test_one_name_in_two_repositories(remote: Any, tmp_path: Path) -> None:
    model(remote.store)
    local = tmp_path / "local"
    (local / "m" / "1").mkdir(parents=True)
    repository = remote.repository(local)
    for twice in (repository.scan()["m"], found(repository)):
        assert str(twice.error) == "model appears in two or more repositories"
    named = remote.repository(local, namespacing=True)
    assert list(named.scan()) == [f"{local}::m", f"{URL}::m"]
    assert named.keys("m") == [f"{local}::m", f"{URL}::m"]
    directory = found(named, f"{URL}::m")
    assert (directory.key, directory.name, directory.namespace) == (f"{URL}::m", "m", URL)
    assert directory.with_files([1]).path.name == "m"
    assert found(named, f"{local}::m").path == local / "m"


def test_an_ensemble_follows_the_models_of_its_repository(remote: Any, tmp_path: Path) -> None:
    remote.store.put("e/config.pbtxt", ENSEMBLE)
    remote.store.put("e/1/")
    local = tmp_path / "local"
    (local / "part" / "1").mkdir(parents=True)
    repository = remote.repository(local, namespacing=True)
    key = f"{URL}::e"

    def namespace() -> str:
        return str(found(repository, key).required_config().ensemble_scheduling.step[0].model_namespace)

    repository.scan()
    assert namespace() == str(local)
    before = repository.scan()[key].fingerprint
    assert before == found(repository, key).fingerprint
    model(remote.store, "part")
    after = repository.scan()[key].fingerprint
    assert after != before
    assert namespace() == URL


@pytest.mark.parametrize("url", ["s3://bucket/a::b", "s3://bucket/a:"])
def test_what_cannot_be_a_namespace(remote: Any, url: str) -> None:
    with pytest.raises(StartupError, match="must have another name"):
        remote.repository(url=url, namespacing=True)
    remote.repository().close()


def test_copies_are_released_by_key(remote: Any) -> None:
    model(remote.store)
    repository = remote.repository(namespacing=True)
    path = found(repository, f"{URL}::m").with_files([1]).path
    repository.release("/elsewhere::m", (), latest=False)
    repository.release(f"{URL}::m", {path}, latest=False)
    assert path.exists()
    assert repository.has_copies
    repository.release(f"{URL}::m", (), latest=False)
    assert not path.exists()
