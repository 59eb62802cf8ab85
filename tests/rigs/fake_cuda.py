"""A driver library without a device (`fake_cuda.c`), built by the test, and the memory of its devices."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from memory_objects import MemoryObjects


class FakeCuda:
    """`library` is the file of the library; processes that use it need `environment`."""

    def __init__(self, directory: Path, compiler: str, objects: MemoryObjects) -> None:
        self._state = directory / "state"
        self._state.mkdir()
        self._objects = objects
        self.library = str(directory / "libcuda.so.1")
        source = Path(__file__).with_suffix(".c")
        subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", self.library, source], check=True)
        self.environment = {"FAKE_CUDA": str(self._state), "LD_LIBRARY_PATH": str(directory)}

    def make(self, content: bytes) -> bytes:
        """The handle of new memory of a device."""
        return str(self._objects.path(self._objects.make(content))).encode().ljust(64, b"\0")

    def content(self, handle: bytes) -> bytes:
        return self._path(handle).read_bytes()

    def free(self, handle: bytes) -> None:
        self._path(handle).unlink()

    def replace(self, handle: bytes, content: bytes) -> None:
        """Other memory behind the same handle."""
        self._path(handle).write_bytes(content)

    def set(self, name: str, text: str = "") -> None:
        """How many `devices` there are, or that they are `lost`."""
        (self._state / name).write_text(text)

    def unset(self, name: str) -> None:
        (self._state / name).unlink()

    def open_handles(self) -> str:
        """What all processes together have open, one a line."""
        return "".join(file.read_text() for file in sorted(self._state.glob("open.*")))

    def _path(self, handle: bytes) -> Path:
        return Path(handle.rstrip(b"\0").decode())


@pytest.fixture
def cuda(tmp_path: Path, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no compiler for the driver library of these tests")
    directory = tmp_path / "cuda"
    directory.mkdir()
    fake = FakeCuda(directory, compiler, objects)
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("charonia.cuda.cuda_library.LIBRARY", fake.library)
    return fake
