"""State is carried from one server program to the other and back, by export and import, with work in every stage."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import carried_state as carried
import pytest
from e2e_jobs import submit, view
from e2e_server import start

from charonia.eventlog.embedded import wheel_binary

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed"),
]


def charonia(*words: str | Path) -> dict[str, Any]:
    """What `charonia state` says."""
    command = [str(Path(sys.executable).parent / "charonia"), "state", *map(str, words), "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return dict(json.loads(answer.stdout))


def kill(server: Any) -> None:
    """All of a server at once, when its log has written all it has: it postpones writes while the disk is busy."""
    with server.log_client() as client:
        while client.info("persistence")["aof_buffer_length"]:
            time.sleep(0.001)
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


def tear(state: Path) -> None:
    """What a power cut leaves: the beginning of a write."""
    (last,) = (state / "appendonlydir").glob("*.incr.aof")
    with last.open("ab") as file:
        file.write(b"*3\r\n$3\r\nSET\r\n$5\r\nepo")


@pytest.mark.long
def test_jobs_results_and_sequences_go_from_valkey_to_redis_and_back(tmp_path: Path) -> None:
    models = carried.build_models(tmp_path / "models")
    valkey, redis = str(wheel_binary()), str(shutil.which("redis-server"))

    # -- the first program, killed with a job that runs and others that wait
    server = start(models, tmp_path / "one", f"--log-server={valkey}")
    server.wait_ready()
    ended = {number: carried.submit_ended(server, number) for number in range(5)}
    once = carried.ask_again(server, 77)
    assert once[0] == 200
    assert carried.step(server, 5, start=True) == carried.state_after(5)
    assert carried.step(server, 6) == carried.state_after(5, 6)
    gate = tmp_path / "gate-1"
    waiting = {50: carried.submit_held(server, gate, 50)}
    waiting |= {number: submit(server, number) for number in range(51, 56)}
    kill(server)

    tear(tmp_path / "one")
    told = charonia("export", tmp_path / "a.state", "--state-dir", tmp_path / "one")
    assert "its last 20 bytes" in told["repaired"]
    assert "lost: SET epo (unfinished)" in told["repaired"]
    assert told["program"].startswith("Valkey 9")
    told = charonia("import", tmp_path / "a.state", "--state-dir", tmp_path / "two", "--log-server", redis)
    assert told["program"].startswith("Redis ")

    # -- the other program, which nobody has to name: it wrote the state
    server = start(models, tmp_path / "two")
    server.wait_ready()
    assert charonia("show", "--state-dir", tmp_path / "two")["used_by"].startswith(
        f"charonia serve (pid {server.process.pid}, since 20"
    )
    with server.log_client() as client:
        assert "valkey_version" not in client.info("server")
    carried.check_results(server, ended)
    assert carried.ask_again(server, 77) == once, "its answer was kept: it is not executed again"
    assert {view(server, location)["state"] for location in waiting.values()} <= {"queued", "running"}
    gate.touch()
    carried.check_results(server, waiting)
    assert carried.step(server, 7) == carried.state_after(5, 6, 7)
    later = {60: carried.submit_held(server, tmp_path / "gate-2", 60)}
    later |= {number: submit(server, number) for number in range(61, 64)}
    kill(server)

    # -- and back, into a directory that has a state
    charonia("export", tmp_path / "b.state", "--state-dir", tmp_path / "two")
    back = ("--state-dir", tmp_path / "one", "--log-server", valkey, "--replace")
    assert Path(charonia("import", tmp_path / "b.state", *back)["replaced"]).is_dir()
    (tmp_path / "gate-2").touch()
    tear(tmp_path / "one")
    server = start(models, tmp_path / "one")
    server.wait_ready()
    with server.log_client() as client:
        assert "valkey_version" in client.info("server")
    assert "the append-only file ended within a write: its last 20 bytes" in server.log()
    assert len(charonia("show", "--state-dir", tmp_path / "one")["repairs"]) == 2
    carried.check_results(server, ended | waiting | later)
    assert carried.ask_again(server, 77) == once
    assert carried.step(server, 8) == carried.state_after(5, 6, 7, 8)
    audit = subprocess.run(
        [str(Path(sys.executable).parent / "charonia"), "audit", "--state-dir", str(tmp_path / "one")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert server.stop() == 0

    # -- the other program is not started on what it cannot read
    refused = start(models, tmp_path / "one", f"--log-server={redis}")
    assert refused.process.wait(180) == 1
    assert f"the state in '{tmp_path / 'one'}' was written by Valkey 9" in refused.log()
    assert "start with --log-server=" in refused.log()
