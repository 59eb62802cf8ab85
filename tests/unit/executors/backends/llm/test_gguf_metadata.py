"""What a GGUF file says is read, and a broken file is refused with the reason."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf_files import write_gguf

from charonia.errors import InvalidArgument
from executors.backends.llm.gguf_metadata import GgufTensor, read_metadata, read_tensors


def test_values_of_all_kinds(tmp_path: Path) -> None:
    values = {"text": "héllo", "number": 7, "part": 0.5, "flag": True, "texts": ["a", ""], "numbers": [1, 2, 3]}
    assert read_metadata(write_gguf(tmp_path / "m.gguf", values)) == values


def test_tensors_lie_behind_the_alignment(tmp_path: Path) -> None:
    tensors = {"a": ((2, 4), 0, b"x" * 32), "b": ((3,), 1, b"y" * 6)}
    path = write_gguf(tmp_path / "m.gguf", {"key": "value"}, tensors)
    found = read_tensors(path)
    assert found[0] == GgufTensor("a", (2, 4), 0, found[0].offset)
    content = path.read_bytes()
    assert content[found[0].offset :][:32] == b"x" * 32
    assert content[found[1].offset :][:6] == b"y" * 6


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it ends too early"),
        (b"GGML" + bytes(40), "does not begin with 'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9 is not known"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1), "it ends too early"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QcI", 1, b"k", 99), "type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QcIIQ", 1, b"k", 9, 8, 1 << 60), "longer than the"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QcIIQ", 1, b"k", 9, 4, 1 << 60), "ends too early"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=reason):
        read_metadata(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read"):
        read_metadata(tmp_path / "none.gguf")
    with pytest.raises(InvalidArgument, match="cannot read"):
        read_tensors(tmp_path / "none.gguf")
