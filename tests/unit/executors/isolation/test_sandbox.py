"""What a process may do once it is in its sandbox, and how many tasks it may have without."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from executors.isolation import sandbox

TRY = """
import errno, mmap, os, socket, sys
from executors.isolation import sandbox

sandbox.enter([sys.argv[1]], sys.argv[2])
import numpy  # starts threads

def error_of(attempt):
    try:
        attempt()
    except OSError as error:
        return error.errno
    return 0

def shared():
    os.ftruncate(os.memfd_create("m"), 4096)

def link():
    os.symlink(sys.argv[3], sys.argv[2] + "/link")
    open(sys.argv[2] + "/link").read()

print([error_of(one) for one in (
    lambda: open(sys.argv[1] + "/file").read(), lambda: open(sys.argv[2] + "/new", "w"), shared, socket.socketpair,
    lambda: open(os.__file__).read(), lambda: open("/proc/self/status").read(),
    lambda: open("/dev/urandom", "rb").read(1),
)])
print([error_of(one) for one in (
    lambda: open(sys.argv[3]).read(), lambda: open(sys.argv[1] + "/new", "w"), link, lambda: os.listdir("/dev/shm"),
    socket.socket, lambda: socket.socket(socket.AF_UNIX), lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    os.fork, lambda: os.posix_spawn(sys.executable, [sys.executable], {}), lambda: open("/proc/1/environ").read(),
    lambda: os.unlink(sys.argv[3]), lambda: os.chroot("/"),
)])
"""


@pytest.mark.skipif(not sandbox.is_available(), reason="this kernel has no Landlock")
def test_what_is_left_and_what_is_not(tmp_path: Path) -> None:
    model, temporary, other = tmp_path / "model", tmp_path / "temporary", tmp_path / "other"
    model.mkdir()
    temporary.mkdir()
    (model / "file").write_text("weights")
    other.write_text("secret")
    done = subprocess.run(
        [sys.executable, "-c", TRY, str(model), str(temporary), str(other)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    allowed, refused = map(json.loads, done.stdout.splitlines())
    assert allowed == [0] * len(allowed)
    assert set(refused) <= {errno.EACCES, errno.EPERM}, refused
    assert other.read_text() == "secret"


DRIVER = """
import os, socket, sys, threading
from executors.isolation import sandbox

sandbox.enter([], sys.argv[1], nvidia=sys.argv[2] == "1")

def error_of(attempt):
    try:
        attempt()
    except OSError as error:
        return error.errno
    return 0

def name_thread():
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
        file.write("cuda-handler")
    with open(f"/proc/self/task/{threading.get_native_id()}/comm") as file:
        assert file.read() == "cuda-handler\\n"

def in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(error_of(name_thread)))
    thread.start()
    thread.join()
    if found[0]:
        raise OSError(found[0], "refused")

def listen():
    global listening
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listening.bind(f"\\0cuda-uvmfd-{os.getpid()}")
    listening.listen(16)

print([error_of(one) for one in (name_thread, in_a_thread, listen)])

def bound_to_a_path():
    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).bind(os.path.dirname(sys.argv[1]) + "/s")

print([error_of(one) for one in (
    lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[3]),
    lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(f"\\0cuda-uvmfd-{os.getpid()}"),
    lambda: listening.accept() if sys.argv[2] == "1" else socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET),
    bound_to_a_path, socket.socket, lambda: socket.socket(socket.AF_UNIX),
    lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_SEQPACKET),
    lambda: open(f"/proc/{os.getppid()}/task/{os.getppid()}/comm", "w"), lambda: open("/proc/self/comm", "w"),
    os.fork,
)])
"""


@pytest.mark.skipif(not sandbox.is_available(), reason="this kernel has no Landlock")
@pytest.mark.parametrize("nvidia", [True, False])
def test_where_nvidias_driver_is_it_may_name_threads_and_listen_and_nothing_else(tmp_path: Path, nvidia: bool) -> None:
    """What `cuInit` does was read in reports of sandboxes it failed in (docs/adr/0076)."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as outside:
        outside.bind(str(tmp_path / "outside"))
        outside.listen()
        words = [str(temporary), str(int(nvidia)), str(tmp_path / "outside")]
        done = subprocess.run([sys.executable, "-c", DRIVER, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wanted, refused = map(json.loads, done.stdout.splitlines())
    assert set(wanted) == ({0} if nvidia else {errno.EACCES}), wanted
    assert set(refused) <= {errno.EACCES, errno.EPERM}, refused


BOMB = """
import os, signal
from executors.isolation import sandbox

os.setgid(54321)
os.setuid(54321)
sandbox.limit_processes(20)
made = []
try:
    while len(made) < 200:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        made.append(pid)
except BlockingIOError:
    pass
for pid in made:
    os.kill(pid, signal.SIGKILL)
    os.wait()
print(len(made))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="takes the place of an ordinary user, whom the limit counts for")
def test_an_ordinary_user_is_kept_from_a_fork_bomb(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BOMB], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[4]
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 20
