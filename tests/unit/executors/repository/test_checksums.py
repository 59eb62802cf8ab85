"""A model loads only with the files its configuration gives the hashes of (C23)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from charonia.errors import CharoniaError, InvalidArgument, Unsupported
from executors.repository.repository_agents import verify_checksums

CONTENT = b"weights"
MD5 = hashlib.md5(CONTENT).hexdigest()
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(CONTENT)
    (tmp_path / "secret").write_bytes(CONTENT)
    return tmp_path / "m"


def verify(model: Path, **hashes: str) -> None:
    verify_checksums(model, hashes)


@pytest.mark.parametrize("key", ["MD5:1/model.onnx", "md5:1/../1/model.onnx"])
def test_a_file_that_is_right_is_right(model: Path, key: str) -> None:
    verify(model, **{key: MD5})
    verify(model, **{"SHA256:1/model.onnx": SHA256.upper()})
    verify(model)


@pytest.mark.parametrize(
    ("key", "value", "kind", "message"),
    [
        ("MD5:1/model.onnx", "00", InvalidArgument,
         f"Mismatched MD5 hash for file 1/model.onnx, expect: 00, got: {MD5}"),
        ("MD5:2/model.onnx", MD5, InvalidArgument,
         "failed to open text file for read 2/model.onnx: No such file or directory"),
        ("MD5:../secret", MD5, InvalidArgument,
         "failed to open text file for read ../secret: it is outside the model directory"),
        ("crc:1/model.onnx", MD5, Unsupported, "Unsupported checksum algorithm: crc"),
        ("1/model.onnx", MD5, InvalidArgument, "failed to parse key: 1/model.onnx"),
    ],
)  # fmt: skip
def test_anything_else_fails_the_load(
    model: Path, key: str, value: str, kind: type[CharoniaError], message: str
) -> None:
    with pytest.raises(kind) as raised:
        verify(model, **{key: value})
    assert raised.value.message == message
