"""Which environment a model's processes get, from directories and archives."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from pathlib import Path

import pytest

from charonia.backend import ModelSource
from charonia.errors import InternalError, InvalidArgument
from executors.backends.python.model_environments import environment_path, interpreter
from protos.model_config_pb2 import ModelConfig


def source(directory: Path, path: str) -> ModelSource:
    config = ModelConfig(name="m")
    config.parameters["EXECUTION_ENV_PATH"].string_value = path
    return ModelSource("m", 1, directory / "m", config, {"environment-cache-dir": str(directory / "cache")})


def environment(directory: Path) -> Path:
    (directory / "bin").mkdir(parents=True)
    (directory / "bin/python").symlink_to(sys.executable)
    return directory


def packed(directory: Path, archive: Path, arcname: str = ".") -> Path:
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(directory, arcname)
    return archive


def test_without_the_parameter_it_is_the_servers(tmp_path: Path) -> None:
    for path in (source(tmp_path, ""), ModelSource("m", 1, tmp_path, ModelConfig())):
        assert interpreter(path).command[0] == sys.executable
        assert interpreter(path).environment is None


def test_a_directory_is_used_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/server/only")
    root = environment(tmp_path / "m" / "env")
    found = interpreter(source(tmp_path, "$$TRITON_MODEL_DIRECTORY/env"))
    assert found.command[0] == str(root / "bin/python")
    assert found.environment is not None
    assert "PYTHONPATH" not in found.environment
    assert found.environment["VIRTUAL_ENV"] == str(root)
    assert found.environment["PATH"].split(os.pathsep)[0] == str(root / "bin")
    packages = json.loads(found.command[-1])
    assert (Path(packages["ours"]["executors"]) / "executors").is_dir()
    assert (Path(packages["borrowed"]["numpy"]) / "numpy").is_dir()
    assert packages["version"] == list(sys.version_info[:2])


@pytest.mark.parametrize("arcname", [".", "inner"])
def test_an_archive_is_unpacked_once(arcname: str, tmp_path: Path) -> None:
    archive = packed(environment(tmp_path / "env"), tmp_path / "env.tar.gz", arcname)
    first = interpreter(source(tmp_path, str(archive)))
    python = Path(first.command[0])
    assert python.is_relative_to(tmp_path / "cache")
    (python.parent / "mark").touch()
    assert interpreter(source(tmp_path, str(archive))).command == first.command
    assert (python.parent / "mark").exists()


def test_another_archive_is_another_environment(tmp_path: Path) -> None:
    archive = packed(environment(tmp_path / "env"), tmp_path / "env.tar.gz")
    before = interpreter(source(tmp_path, str(archive))).command[0]
    archive.unlink()
    (tmp_path / "env" / "more").write_text("more")
    packed(tmp_path / "env", archive)
    after = interpreter(source(tmp_path, str(archive))).command[0]
    assert after != before
    assert Path(before).exists(), "processes may still run there"


def test_the_same_archive_elsewhere_is_the_same_environment(tmp_path: Path) -> None:
    archive = packed(environment(tmp_path / "env"), tmp_path / "env.tar.gz")
    before = interpreter(source(tmp_path, str(archive))).command
    archive.rename(tmp_path / "moved.tar.gz")
    assert interpreter(source(tmp_path, str(tmp_path / "moved.tar.gz"))).command == before


def test_what_somebody_left_half_unpacked_is_unpacked_anew(tmp_path: Path) -> None:
    archive = packed(environment(tmp_path / "env"), tmp_path / "env.tar.gz")
    python = Path(interpreter(source(tmp_path, str(archive))).command[0])
    python.unlink()
    next((tmp_path / "cache").glob("*.ready")).unlink()
    assert Path(interpreter(source(tmp_path, str(archive))).command[0]).exists()


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"^Failed to get the canonical path for /none/env\.tar\.gz\.$"):
        environment_path(source(tmp_path, "/none/env.tar.gz"))
    with pytest.raises(InvalidArgument, match="must be an absolute path or begin with"):
        environment_path(source(tmp_path, "env.tar.gz"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match="holds no python environment: there is no bin/python"):
        interpreter(source(tmp_path, str(tmp_path / "empty")))
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(InvalidArgument, match="is not a readable archive"):
        interpreter(source(tmp_path, str(tmp_path / "text")))


def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    archive = packed(environment(tmp_path / "env"), tmp_path / "env.tar.gz")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(InternalError, match="can be written by others"):
        interpreter(source(tmp_path, str(archive)))


@pytest.mark.parametrize("status", [0, 3])
def test_conda_unpack_puts_a_packed_environment_right(status: int, tmp_path: Path) -> None:
    root = environment(tmp_path / "env")
    (root / "bin/conda-unpack").write_text(
        "import pathlib, sys\n"
        "pathlib.Path(__file__).with_name('unpacked').touch()\n"
        f"print('no good', file=sys.stderr)\nsys.exit({status})\n"
    )
    archive = packed(root, tmp_path / "env.tar.gz")
    if status:
        with pytest.raises(InvalidArgument, match="conda-unpack of the environment failed: no good"):
            interpreter(source(tmp_path, str(archive)))
        assert not list((tmp_path / "cache").glob("*.ready"))
    else:
        assert Path(interpreter(source(tmp_path, str(archive))).command[0]).with_name("unpacked").exists()
