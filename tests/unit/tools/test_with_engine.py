"""`with_engine.sh` beside what is not its own, on a machine whose commands are programs of this test."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools/container_engine/with_engine.sh"


def machine(folder: Path, addresses: str, **more: str) -> dict[str, str]:
    """The environment of a machine without an engine. Its commands write themselves to `called`."""
    programs = {
        "docker": "exit 1",
        "id": "echo 0",
        "flock": "exit 0",
        "dpkg-query": "echo installed",
        "apt-get": "exit 1",
        "dockerd": "exit 1",
        "mount": "exit 1",
        "umount": "exit 0",
        "ip": f"echo '{addresses}'",
    } | more
    for name, does in programs.items():
        program = folder / "programs" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/called\n{does}\n')
        program.chmod(0o755)
    kept = folder / "kept"
    (kept / "programs").mkdir(parents=True)
    (kept / "programs/complete").touch()
    path = f"{folder}/programs:{os.environ['PATH']}"
    return {"PATH": path, "CHARONIA_ENGINE_DIR": str(kept), "TMPDIR": str(folder)}


def run(folder: Path, environment: dict[str, str], *command: str) -> tuple[int, str, list[str]]:
    """The exit code, the last line, and what was called of `machine`."""
    done = subprocess.run([SCRIPT, *command], env=environment, capture_output=True, text=True, check=False, timeout=60)
    called = (folder / "called").read_text().splitlines()
    return done.returncode, (done.stderr.splitlines() or [""])[-1], called


@pytest.mark.skipif(not os.access("/run/lock", os.W_OK), reason="its lock is there")
def test_where_its_addresses_are_taken_none_is_started(tmp_path: Path) -> None:
    """The machine's own interface stays: at the end all that has such an address was deleted."""
    environment = machine(tmp_path, "4: eth0    inet 172.29.3.4/20 brd 172.29.15.255 scope global eth0")
    code, last, called = run(tmp_path, environment, "true")
    assert code == 69
    if ", of another engine: " not in last:  # where the tests run there is none
        assert last == "with_engine: the engine's addresses are taken: eth0 has 172.29.3.4/20"
    assert not [line for line in called if line.startswith(("dockerd", "mount", "umount")) or "delete" in line]


def test_beside_an_engine_that_answers_nothing_is_cleaned(tmp_path: Path) -> None:
    environment = machine(tmp_path, "", docker="exit 0")
    code, _, called = run(tmp_path, environment, "sh", "-c", "exit 3")
    assert code == 3
    assert {line.partition(" ")[0] for line in called} == {"docker"}
