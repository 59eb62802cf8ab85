"""The pages about the compose stack, followed as a reader would, with Docker Engine: `make stack-pages`.

Each begins in what a clone has of images and compose file, beside the example models. The first brings the stack up
and takes it down, the next has it up. Containers and volumes have the names that the pages show: where there are some
already, they are another's, and nothing is done.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_commands import OF_THE_STACK, ROOT, Reader

PORTS = {
    "HTTP_PORT": "127.0.0.1:8000",
    "GRPC_PORT": "127.0.0.1:8001",
    "PROMETHEUS_PORT": "127.0.0.1:9090",
    "CONSOLE_PORT": "127.0.0.1:8004",
}
"""The variables of the compose file, and what the pages say for them."""
PROJECT = "label=com.docker.compose.project=charonia"


def docker(*words: str, folder: Path = ROOT, **variables: str) -> str:
    """The output of a command in a folder. Raises AssertionError with what it said if it fails."""
    done = subprocess.run(
        ["docker", *words],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert not done.returncode, f"docker {' '.join(words)}: {done.stdout[-3000:]}"
    return done.stdout


def compose(*words: str, folder: Path = ROOT, **variables: str) -> str:
    return docker("compose", "-f", "infra/docker-compose.yml", *words, folder=folder, **variables)


def free_ports() -> dict[str, str]:
    """One for each variable; all are held until all are known."""
    sockets = {name: socket.create_server(("127.0.0.1", 0)) for name in PORTS}
    ports = {name: str(one.getsockname()[1]) for name, one in sockets.items()}
    for one in sockets.values():
        one.close()
    return ports


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, str]]:
    """Of a stack that there is not yet; whatever there is of it at the end is removed."""
    theirs = docker("ps", "-aq", "--filter", PROJECT) + docker("volume", "ls", "-q", "--filter", PROJECT)
    assert not theirs, "there is a stack 'charonia', which the commands of the pages would change"
    chosen = free_ports()
    try:
        yield chosen
    finally:
        compose("--profile", "*", "down", "-v", "-t", "5", **chosen)


def reader(folder: Path, ports: dict[str, str]) -> Reader:
    """In a folder with what images are built of, and the compose file."""
    needed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in {"infra", *(name.partition("/")[0] for name in needed)}:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, folder / name)
    places = {shown: f"127.0.0.1:{ports[name]}" for name, shown in PORTS.items()}
    return Reader(folder, places=places, environment={**ports, "COMPOSE_ANSI": "never"})


@pytest.mark.parametrize("page", OF_THE_STACK)
def test_a_reader_sees_what_the_page_shows(page: str, ports: dict[str, str], tmp_path: Path) -> None:
    one = reader(tmp_path, ports)
    if page != OF_THE_STACK[0]:
        compose("up", "-d", "--build", "--wait", folder=tmp_path, **ports)
    wrong = one.follow((ROOT / page).read_text())
    assert not wrong, "\n\n".join(wrong) + compose("logs", "--no-color", "--tail", "15", **ports)


def test_a_repository_that_is_not_there_is_refused(ports: dict[str, str], tmp_path: Path) -> None:
    """An empty folder in its place would be served, and would be root's."""
    nowhere = tmp_path / "models"
    with pytest.raises(AssertionError, match="bind source path does not exist"):
        compose("up", "-d", "--no-deps", "executor", MODELS=str(nowhere), **ports)
    assert not nowhere.exists()
