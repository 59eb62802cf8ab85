"""Archives of python environments, honest and hostile."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from charonia.errors import InvalidArgument
from executors.backends.python.model_environments import Bounds, unpack

Add = Callable[[tarfile.TarFile], None]


def archive(path: Path, *adds: Add, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for add in adds:
            add(tar)
    return path


def file(name: str, content: bytes = b"x", mode: int = 0o644) -> Add:
    def add(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(content), mode
        tar.addfile(info, io.BytesIO(content))

    return add


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Add:
    def add(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, target
        tar.addfile(info)

    return add


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_files_links_and_modes(mode: str, tmp_path: Path) -> None:
    packed = archive(
        tmp_path / "env",
        file("./bin/tool", b"#!", 0o6777),
        file("lib/a.py", b"a"),
        link("lib/b.py", "lib/a.py", tarfile.LNKTYPE),
        link("bin/python", "/usr/bin/python3"),
        link("lib64", "lib"),
        mode=mode,
    )
    into = tmp_path / "out"
    unpack(packed, into)
    assert (into / "bin/tool").read_bytes() == b"#!"
    assert (into / "bin/tool").stat().st_mode & 0o7777 == 0o755, "no set-uid bit, not writable by others"
    assert (into / "lib/a.py").stat().st_ino == (into / "lib/b.py").stat().st_ino
    assert str((into / "bin/python").readlink()) == "/usr/bin/python3"
    assert (into / "lib64/a.py").read_bytes() == b"a"


@pytest.mark.parametrize(
    ("adds", "text"),
    [
        ([file("../outside")], "which is outside of it"),
        ([file("a/../../outside")], "which is outside of it"),
        ([file("/tmp/charonia-outside")], "which is outside of it"),
        ([link("mine", "../outside", tarfile.LNKTYPE)], "which is outside of it"),
        ([link("../outside", "x")], "which is outside of it"),
        ([link("device", "", tarfile.CHRTYPE)], "which is no file, directory or link"),
        ([link("pipe", "", tarfile.FIFOTYPE)], "which is no file, directory or link"),
    ],
)
def test_what_lies_outside_is_refused_and_nothing_is_left(adds: list[Add], text: str, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("before")
    packed = archive(tmp_path / "env", file("first"), *adds)
    with pytest.raises(InvalidArgument, match=text):
        unpack(packed, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "outside").read_text() == "before"


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    packed = archive(tmp_path / "env", link("way", str(tmp_path)), file("way/outside", b"evil"))
    unpack(packed, tmp_path / "out")
    assert not (tmp_path / "outside").exists()
    assert (tmp_path / "out/way/outside").read_bytes() == b"evil"


@pytest.mark.parametrize("bounds", [Bounds(files=2), Bounds(size_bytes=5)])
def test_an_archive_has_bounds(bounds: Bounds, tmp_path: Path) -> None:
    packed = archive(tmp_path / "env", file("a", b"12"), file("b", b"34"), file("c", b"56"))
    with pytest.raises(InvalidArgument, match="is too large to be unpacked"):
        unpack(packed, tmp_path / "out", bounds)
    assert not (tmp_path / "out").exists()


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    whole = archive(tmp_path / "env", file("a", bytes(range(256)) * 4000)).read_bytes()
    (tmp_path / "none").write_bytes(b"no archive")
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    for name in ("none", "cut"):
        with pytest.raises(InvalidArgument, match="is not a readable archive"):
            unpack(tmp_path / name, tmp_path / "out")
        assert not (tmp_path / "out").exists()
