"""Repositories in real object stores' servers (R7): what an executor loads from them, follows and fetches again."""

from __future__ import annotations

import asyncio
import io
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import object_stores
import pytest
from executor_bench import WEIGHTS, linear, running, x

from charonia.errors import StartupError
from charonia.facts.events import RepositoryScanned, VersionLoaded, VersionUnloaded
from charonia.tensors import Tensor
from executors.repository.remote.credentials import choose
from executors.repository.remote.opening import RemoteRepositories
from executors.repository.remote.store import ObjectChanged, ObjectStore, RemoteError, parse

# Google's package would like one more
pytestmark = pytest.mark.filterwarnings("ignore:Please install grpcio-status:ImportWarning")

_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_", "TRITON_")


@pytest.fixture(scope="module", params=["s3", "gs", "as"])
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    if why := object_stores.missing(request.param):
        pytest.skip(why)
    with object_stores.BUCKETS[request.param]() as bucket:
        yield bucket


@pytest.fixture(scope="module")
def s3_server() -> Iterator[Any]:
    if why := object_stores.missing("s3"):
        pytest.skip(why)
    with object_stores.s3_bucket() as bucket:
        yield bucket


def _only(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Nothing of the machine's own counts."""
    for name in [name for name in os.environ if name.startswith(_VARIABLES)]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    _only(monkeypatch, server.environment)
    return server


@pytest.fixture
def s3(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    _only(monkeypatch, s3_server.environment)
    return s3_server


def put_linear(bucket: Any, directory: Path, name: str, weights: np.ndarray = WEIGHTS) -> None:
    file = directory / "made.onnx"
    linear(file, weights)
    bucket.put(name, file.read_bytes())


def opened(url: str, environ: dict[str, str] | None = None) -> ObjectStore:
    return RemoteRepositories(os.environ if environ is None else environ)._store(parse(url))


# -- stores ------------------------------------------------------------------------------------------------------------


def test_a_store_lists_what_is_below_a_path_and_copies_it_as_it_was_listed(bucket: Any) -> None:
    content = {"a/1/model.onnx": b"0123" * 600_000, "a/config.pbtxt": b"", "ü ?#%20&+'.txt": b"odd", "deep/er/x": b"x"}
    for name, data in content.items():
        bucket.put(f"listed/{name}", data)
    bucket.put("listed-too/x", b"another path")
    bucket.put("listed/e/1/", b"")
    store = opened(bucket.url("listed/"))
    listed = {found.name: found for found in store.objects()}
    assert {name: found.size_bytes for name, found in listed.items() if not found.is_directory} == {
        name: len(data) for name, data in content.items()
    }
    assert [name for name, found in listed.items() if found.is_directory] == ["e/1"]
    assert [found.name for found in store.objects("deep/")] == ["deep/er/x"]
    assert {found.name: found.stamp for found in store.objects()} == {name: f.stamp for name, f in listed.items()}
    for name, data in content.items():
        sink = io.BytesIO()
        store.copy(listed[name], sink)
        assert sink.getvalue() == data
    bucket.put("listed/deep/er/x", b"y")
    (after,) = store.objects("deep/")
    assert after.stamp != listed["deep/er/x"].stamp
    bucket.delete("listed/deep/er/x")
    with pytest.raises(ObjectChanged, match=r"'deep/er/x' of .* changed while it was fetched"):
        store.copy(after, io.BytesIO())
    store.close()


def test_an_object_that_changed_is_not_taken_for_the_one_that_was_listed(bucket: Any) -> None:
    if bucket.url().startswith("gs:"):
        pytest.skip("the emulator does not look at the generation that is asked for")
    bucket.put("changing", b"old")
    store = opened(bucket.url())
    (found,) = store.objects("changing")
    bucket.put("changing", b"new")
    with pytest.raises(ObjectChanged):
        store.copy(found, io.BytesIO())
    store.close()


def test_more_than_a_page_is_listed(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = opened(s3.url("many"))
    monkeypatch.setattr(type(store), "page_objects", 2)
    for number in range(5):
        s3.put(f"many/{number}", b"")
    assert sorted(found.name for found in store.objects()) == ["0", "1", "2", "3", "4"]
    store.close()


def test_a_bucket_that_is_not_there(bucket: Any) -> None:
    store = opened(bucket.url("path", "nobodys"))
    with pytest.raises(RemoteError, match=r"the model repository '.*nobodys/path' cannot be read: .*'nobodys'; check"):
        list(store.objects())
    store.close()


@pytest.mark.parametrize(("kind", "url"), [("s3", "s3://127.0.0.1:1/b"), ("as", "as://http://127.0.0.1:1/a/c")])
def test_a_server_that_is_not_there(kind: str, url: str, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "as" and "azure" in object_stores.missing("as"):
        pytest.skip(object_stores.missing("as"))
    store = opened(url)
    with pytest.raises(RemoteError, match=r"cannot be read: http://127\.0\.0\.1:1.* cannot be reached"):
        list(store.objects())
    store.close()


# -- as whom -----------------------------------------------------------------------------------------------------------


def test_requests_are_signed_by_whom_the_file_or_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a server that looks at signatures. Secrets are in no text."""
    if why := object_stores.missing("s3"):
        pytest.skip(why)
    with object_stores.s3_bucket() as bucket:
        _only(monkeypatch, {})
        iam = bucket.client_as("key", "secret", "iam")
        iam.create_user(UserName="reader")
        key = iam.create_access_key(UserName="reader")["AccessKey"]
        policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
        iam.put_user_policy(UserName="reader", PolicyName="read", PolicyDocument=json.dumps(policy))
        bucket.put("m/config.pbtxt", b"")
        checking = urllib.request.Request(
            f"{bucket.endpoint}/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"}, method="POST"
        )
        urllib.request.urlopen(checking, timeout=30).close()
        good = {"key_id": key["AccessKeyId"], "secret_key": key["SecretAccessKey"], "region": "eu-central-1"}
        bad = {"key_id": key["AccessKeyId"], "secret_key": "guessed", "region": "eu-central-1"}
        path = tmp_path / "credentials.json"

        def listed(entries: dict[str, Any]) -> list[str]:
            path.write_text(json.dumps({"s3": entries}))
            store = opened(bucket.url("m"), {"TRITON_CLOUD_CREDENTIAL_PATH": str(path)})
            try:
                return [found.name for found in store.objects()]
            finally:
                store.close()

        assert listed({"": bad, bucket.url()[:-1]: good}) == ["config.pbtxt"]
        with pytest.raises(
            RemoteError, match=r"access to the bucket 'models' was denied \(\w+\); the identity "
        ) as refused:
            listed({"": good, bucket.url()[:-1]: bad})
        assert "guessed" not in str(refused.value)
        # a profile of AWS's own files, and the variables
        profiles = tmp_path / "aws"
        profiles.write_text(
            f"[reader]\naws_access_key_id = {good['key_id']}\naws_secret_access_key = {good['secret_key']}\n"
        )
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profiles))
        assert listed({"": {"profile": "reader", "region": "eu-central-1"}}) == ["config.pbtxt"]
        with pytest.raises(RemoteError, match=r"cannot be used: .*\(nobody\) could not be found"):
            listed({"": {"profile": "nobody"}})
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", good["key_id"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", good["secret_key"])
        store = opened(bucket.url("m"))
        assert [found.name for found in store.objects()] == ["config.pbtxt"]
        store.close()


def test_an_account_key_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    if why := object_stores.missing("as"):
        pytest.skip(why)
    with object_stores.azure_bucket() as bucket:
        _only(monkeypatch, {**bucket.environment, "AZURE_STORAGE_KEY": "Z3Vlc3NlZA=="})
        store = opened(bucket.url())
        with pytest.raises(RemoteError, match="access to the container 'models' was denied") as refused:
            list(store.objects())
        assert "Z3Vlc3NlZA" not in str(refused.value)
        store.close()
        address = parse(bucket.url())
        assert "Z3Vlc3NlZA" not in repr(choose(address, os.environ))


def test_accounts_with_directories_list_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hierarchical namespace has a blob without content for each, told by its metadata."""
    if why := object_stores.missing("as"):
        pytest.skip(why)
    with object_stores.azure_bucket() as bucket:
        _only(monkeypatch, dict(bucket.environment))
        bucket.put_directory("repo/m")
        bucket.put_directory("repo/m/1")
        store = opened(bucket.url("repo"))
        assert sorted((found.name, found.is_directory) for found in store.objects()) == [("m", True), ("m/1", True)]
        store.close()


# -- an executor -------------------------------------------------------------------------------------------------------


def _copies(directory: Path) -> set[str]:
    """The copies there are, as <model>/<path>."""
    return {"/".join(path.parts[-3:]) for path in directory.glob("*/*/*/*/*") if path.is_file()}


async def _answered_rows(bench: Any, model: str) -> int:
    request_id, record = await bench.accept(model, [Tensor.of("x", x(1))])
    await bench.dispatch(model, [record])
    answer = (await bench.replies("gw", 1))[request_id]
    assert answer.error is None
    return int(answer.outputs[0].shape[0])


async def test_explicit_control_fetches_what_is_asked_for(bucket: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        put_linear(bucket, tmp_path, f"explicit/{name}/1/model.onnx")
    copies = tmp_path / "copies"
    async with running(
        tmp_path,
        model_repository=(bucket.url("explicit"),),
        repository_copies=os.fspath(copies),
        model_control_mode="explicit",
        load_model=("a",),
    ) as bench:
        scanned = await bench.control.fact(RepositoryScanned)
        assert tuple(scanned.models) == ("a", "b")
        assert _copies(copies) == {"a/1/model.onnx"}
        first = await bench.control.fact(VersionLoaded, model="a")
        assert (await bench.request("load", "b")).error == ""
        assert (await bench.request("load", "a")).error == ""
        assert sum(isinstance(fact, VersionLoaded) for fact in bench.control.facts()) == 2, "nothing changed in a"
        put_linear(bucket, tmp_path, "explicit/a/1/model.onnx", WEIGHTS * 2)
        assert (await bench.request("load", "a")).error == ""
        second = [fact for fact in bench.control.facts() if isinstance(fact, VersionLoaded)][-1]
        assert second.content_hash != first.content_hash
        assert (await bench.request("load", "c")).error == "failed to load 'c', failed to poll from model repository"
        assert (await bench.request("unload", "b")).error == ""
        await bench.control.fact(VersionUnloaded, model="b")
        await bench.service._deployment.idle()
        assert _copies(copies) == {"a/1/model.onnx"}
        assert len(list(copies.glob("*/*/a"))) == 1, "the copy of before is gone"
    assert list(copies.iterdir()) == []


async def test_instances_keep_the_copy_they_are_made_from(bucket: Any, tmp_path: Path) -> None:
    """One that dies is made again from it, also when the model has got a new copy with another number of them (R23)."""
    put_linear(bucket, tmp_path, "resized/m/1/model.onnx")
    bucket.put("resized/m/config.pbtxt", "instance_group { count: 1 kind: KIND_CPU }")
    copies = tmp_path / "copies"
    async with running(
        tmp_path,
        model_repository=(bucket.url("resized"),),
        repository_copies=os.fspath(copies),
        model_control_mode="explicit",
        load_model=("m",),
    ) as bench:
        for count in (2, 3):
            bucket.put("resized/m/config.pbtxt", f"instance_group {{ count: {count} kind: KIND_CPU }}")
            assert (await bench.request("load", "m")).error == ""
        await bench.service._deployment.idle()
        served = bench.service._deployment.find("m", 1)
        directories = [spec.source.directory for spec in served.pool.specs]
        assert len(directories) == len(set(directories)) == 3
        assert all((directory / "1" / "model.onnx").exists() for directory in directories)
        assert (await bench.request("unload", "m")).error == ""
        await bench.control.fact(VersionUnloaded, model="m")
        await bench.service._deployment.idle()
        assert _copies(copies) == set()


async def test_polling_follows_objects(bucket: Any, tmp_path: Path) -> None:
    (tmp_path / "local" / "here" / "1").mkdir(parents=True)
    linear(tmp_path / "local" / "here" / "1" / "model.onnx")
    put_linear(bucket, tmp_path, "polled/m/1/model.onnx")
    bucket.put("polled/m/config.pbtxt", "version_policy { all {} }")
    async with running(
        tmp_path,
        model_repository=(bucket.url("polled"), os.fspath(tmp_path / "local")),
        repository_copies=os.fspath(tmp_path / "copies"),
        model_control_mode="poll",
        repository_poll_secs=3600.0,
    ) as bench:

        def loaded() -> list[tuple[str, int]]:
            return [(fact.model, fact.version) for fact in bench.control.facts() if isinstance(fact, VersionLoaded)]

        assert sorted(loaded()) == [("here", 1), ("m", 1)]
        await bench.service.poll_once()
        assert len(loaded()) == 2
        put_linear(bucket, tmp_path, "polled/m/2/model.onnx", WEIGHTS * 2)
        await bench.service.poll_once()
        assert loaded()[2:] == [("m", 2)], "version 1 is left alone (R10)"
        bucket.delete("polled/m/2/model.onnx")
        await bench.service.poll_once()
        await bench.control.fact(VersionUnloaded, model="m", version=2)
        bucket.put("polled/m/config.pbtxt", "nonsense {")
        await bench.service.poll_once()
        assert len(loaded()) == 3
        bucket.delete("polled/m/config.pbtxt")
        bucket.delete("polled/m/1/model.onnx")
        await bench.service.poll_once()
        await bench.control.fact(VersionUnloaded, model="m", version=1)
        await bench.service._deployment.idle()
        assert _copies(tmp_path / "copies") == set()


async def test_a_store_that_is_away_takes_nothing_from_what_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if why := object_stores.missing("s3"):
        pytest.skip(why)
    with object_stores.s3_bucket() as bucket:
        _only(monkeypatch, bucket.environment)
        put_linear(bucket, tmp_path, "m/1/model.onnx")
        settings = {"repository_copies": os.fspath(tmp_path / "copies"), "model_control_mode": "poll"}
        service = running(tmp_path, model_repository=(bucket.url(),), repository_poll_secs=3600.0, **settings)
        bench = await service.__aenter__()
    try:
        await bench.service.poll_once()
        assert "cannot be reached" in caplog.text
        assert "; what is loaded from it stays" in caplog.text
        assert await _answered_rows(bench, "m") == 1
    finally:
        await service.__aexit__(None, None, None)


async def test_a_start_without_the_store_is_one_sentence(s3: Any, tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    with pytest.raises(StartupError, match=r"^the model repository 's3://.*/nobodys' cannot be read: .* has no bucket"):
        async with running(
            tmp_path,
            model_repository=(s3.url("", "nobodys"),),
            repository_copies=os.fspath(tmp_path / "copies"),
        ):
            pass
    assert list((tmp_path / "copies").iterdir()) == []
    assert asyncio.all_tasks() == before
