"""PyTorch's files that are programs: scripts that open files, scripts with a pickle, packages with other code."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_calls import instance_of
from torch_models import DENSE, as_package, dense, nested_tensors, package, scripted, source, spec

from charonia.errors import CharoniaError, InternalError, Unsupported
from executors.backends.pytorch import PyTorchBackend
from executors.isolation.isolated_model import IsolatedModel

__all__ = ["package"]

SECRET = b"7 of the others"
FOREIGN = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) {
  FILE *file = fopen("WRITTEN", "w");
  fputs("run", file);
  fclose(file);
}
"""


class Reads(torch.nn.Module):
    """Answers with the first bytes of a file that the graph itself opens."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = str(path)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_file(self.path, False, 7, dtype=torch.uint8).to(x.dtype).reshape(1, 7) + x


def edited(path: Path, edit: Callable[[str, bytes], bytes]) -> None:
    """Change the files of an archive in place; each gets its name without the archive's folder."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, edit(name.partition("/")[2], content))


def foreign_library(folder: Path, mark: Path) -> bytes:
    """A library that writes a file when it is loaded."""
    compiler = shutil.which("cc")
    assert compiler is not None, "the package itself was made with one"
    (folder / "foreign.c").write_text(FOREIGN.replace("WRITTEN", str(mark)))
    library = folder / "foreign.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "foreign.c"], check=True)
    return library.read_bytes()


async def read_by(directory: Path, file: Path, isolation: Any) -> bytes:
    """What a script that reads a file answers."""
    scripted(Reads(file), directory / "1" / "model.pt")
    of = source(
        directory,
        'input { name: "x" data_type: TYPE_FP32 dims: [1, 7] } '
        'output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [1, 7] }',
    )
    model = IsolatedModel(replace(of, isolation=isolation), ceiling_s=0)
    instance: Any = None
    try:
        instance = await model.create_instance(spec(of))
        given = {"x": np.zeros((1, 7), np.float32)}
        found = await asyncio.to_thread(instance.execute, given, ["OUTPUT__0"])
        return bytes(found["OUTPUT__0"].astype(np.uint8))
    finally:
        if instance is not None:
            await asyncio.to_thread(instance.close)
        await model.close()


async def test_a_script_that_opens_a_file_gets_none_of_others(tmp_path: Path) -> None:
    """`torch.from_file` is an operator of TorchScript like any other: only the sandbox keeps it from reading."""
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    with pytest.raises(InternalError, match=r"PyTorch execute failure: .*Permission denied"):
        await read_by(tmp_path / "sandboxed", secret, "sandbox")
    own = tmp_path / "owner" / "1" / "own"
    own.parent.mkdir(parents=True)
    own.write_bytes(SECRET)
    assert await read_by(tmp_path / "owner", own, "sandbox") == SECRET[:7], "a model may read its own folder"
    assert PyTorchBackend.isolation == "sandbox", "the default"


async def test_without_the_sandbox_it_would_read_it(tmp_path: Path) -> None:
    """What the sandbox is for. Once PyTorch's loader refuses the operator, the rule may go."""
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    assert await read_by(tmp_path / "m", secret, "process") == SECRET[:7]


@pytest.mark.parametrize("file", ["data.pkl", "constants.pkl"])
async def test_a_pickle_in_a_script_is_not_run(file: str, tmp_path: Path) -> None:
    """TorchScript has an unpickler of its own, which knows the types of scripts alone."""
    command = f"touch {tmp_path}/written".encode()
    # a call of posix.system, as pickles have it
    injected = b"\x80\x02cposix\nsystem\nX" + len(command).to_bytes(4, "little") + command + b"\x85R."
    path = tmp_path / "m" / "1" / "model.pt"
    scripted(dense(), path)
    edited(path, lambda name, content: injected if name == file else content)
    why = re.escape("failed to load model 'm': RuntimeError: \nUnknown type name 'posix.system'")
    with pytest.raises(CharoniaError, match=why):
        await instance_of(PyTorchBackend(), spec(source(tmp_path / "m", f"max_batch_size: 8 {DENSE}")))
    assert not (tmp_path / "written").exists()


async def test_a_package_with_another_library_needs_the_operators_leave(package: bytes, tmp_path: Path) -> None:
    mark = tmp_path / "written"
    directory = as_package(tmp_path / "m", package)
    foreign = foreign_library(tmp_path, mark)
    replaced: list[str] = []

    def edit(name: str, content: bytes) -> bytes:
        if name.endswith(".so"):
            replaced.append(name)
            return foreign
        return content

    edited(directory / "1" / "model.pt2", edit)
    assert len(replaced) == 1
    text = f'platform: "torch_aoti" max_batch_size: 8 {nested_tensors()}'
    with pytest.raises(Unsupported, match=r"model 'm' brings machine code: 'model.pt2' is .*--allow-native-models"):
        await instance_of(PyTorchBackend(), spec(source(directory, text)))
    assert not mark.exists(), "nothing of it was opened"
    with pytest.raises(CharoniaError):
        await instance_of(PyTorchBackend(), spec(source(directory, text, leave=True)))
    assert mark.read_text() == "run", "what the operator's leave is for: its constructor runs, and then it fails"
