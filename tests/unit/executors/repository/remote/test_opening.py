"""Which adapter and which directory a remote repository gets, and what is said when a library is missing (R7)."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from memory_store import MemoryStore

from charonia.errors import StartupError
from executors.repository.remote.opening import RemoteRepositories
from executors.repository.remote.store import ObjectStore, RemoteAddress


class InMemory(RemoteRepositories):
    """Opens no connection."""

    def _store(self, address: RemoteAddress) -> ObjectStore:
        return MemoryStore()


@pytest.mark.parametrize(
    ("url", "module", "adapter", "extra"),
    [
        ("s3://bucket/path", "boto3", "s3", "s3"),
        ("gs://bucket/path", "google.auth", "gcs", "gcs"),
        ("as://account/container", "azure.core", "azure", "azure"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    url: str, module: str, adapter: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"executors.repository.remote.{adapter}", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StartupError) as caught:
        RemoteRepositories({}).open(url, None)
    assert str(caught.value).startswith(f"the model repository '{url}' needs a package that is not installed (")
    assert str(caught.value).endswith(f": pip install 'charonia[{extra}]'")


@pytest.mark.parametrize(("name", "why"), [("", "Is a directory"), ("gone", "was not found"), ("key", "not .*JSON")])
def test_a_key_file_that_cannot_be_used_is_named(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("google.cloud.storage")
    (tmp_path / "key").write_text("key: secret")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / name))
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    with pytest.raises(StartupError, match=f"^the model repository 'gs://bucket' cannot be used: .*{why}") as caught:
        RemoteRepositories({"GOOGLE_APPLICATION_CREDENTIALS": "given"}, str(tmp_path / "copies")).open(
            "gs://bucket", None
        )
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_half_a_key_is_none(tmp_path: Path) -> None:
    pytest.importorskip("boto3")
    file = tmp_path / "credentials.json"
    file.write_text('{"s3": {"": {"key_id": "k", "session_token": "t"}}}')
    with pytest.raises(StartupError, match=r"'s3://bucket' cannot be used: key_id and secret_key go together$"):
        RemoteRepositories({"TRITON_CLOUD_CREDENTIAL_PATH": str(file)}).open("s3://bucket", None)


def test_no_library_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, executors.app, charonia.composition.supervisor;"
        "print([m for m in ('boto3', 'azure.core', 'google.cloud.storage') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("s3://bucket", "TRITON_AWS_MOUNT_DIRECTORY"),
        ("gs://bucket", "TRITON_GCS_MOUNT_DIRECTORY"),
        ("as://account/container", "TRITON_AZURE_MOUNT_DIRECTORY"),
    ],
)
def test_the_providers_variable_says_where_copies_go_and_that_they_stay(
    url: str, variable: str, tmp_path: Path
) -> None:
    mount, other = tmp_path / "mount", tmp_path / "other"
    root = InMemory({variable: str(mount)}, str(other)).open(url, None)
    assert len(list(mount.iterdir())) == 1
    root.close()
    assert len(list(mount.iterdir())) == 1
    assert not other.exists()
    root = InMemory({}, str(other)).open(url, None)
    assert len(list(other.iterdir())) == 1
    root.close()
    assert list(other.iterdir()) == []


def test_libraries_do_not_tell_of_their_requests(tmp_path: Path) -> None:
    InMemory({}, str(tmp_path)).open("s3://bucket", None).close()
    for name in ("botocore", "azure", "google", "urllib3"):
        assert not logging.getLogger(f"{name}.x").isEnabledFor(logging.INFO)
