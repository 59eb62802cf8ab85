"""What a process may do once it is in its sandbox, and how many tasks it may have without."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
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
@pytest.mark.parametrize("others", ["", "/tmp", "/var/tmp", "/dev/shm"], ids=lambda path: path or "beside its own")
def test_what_is_left_and_what_is_not(tmp_path: Path, others: str) -> None:
    model, temporary = tmp_path / "model", tmp_path / "temporary"
    model.mkdir()
    temporary.mkdir()
    (model / "file").write_text("weights")
    # wherever the files of this test lie
    with tempfile.TemporaryDirectory(prefix="charonia-test-", dir=others or tmp_path) as folder:
        other = Path(folder) / "other"
        other.write_text("secret")
        words = [str(model), str(temporary), str(other)]
        done = subprocess.run([sys.executable, "-c", TRY, *words], capture_output=True, text=True, check=False)
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


OTHERS = """
import ctypes, errno, os, socket, struct, sys, threading
from executors.isolation import sandbox

temporary, path, abstract = sys.argv[1:4]
shared, key = map(int, sys.argv[4:])
sandbox.enter([], temporary)
libc = ctypes.CDLL(None, use_errno=True)
x86 = os.uname().machine == "x86_64"

def error_of(attempt):
    try:
        attempt()
    except OSError as error:
        return error.errno
    return 0

def call(on_x86, on_arm, *words):
    if libc.syscall(on_x86 if x86 else on_arm, *[ctypes.c_long(w) if type(w) is int else w for w in words]) < 0:
        raise OSError(ctypes.get_errno(), "refused")

def limit_of(pid, new=None):
    call(302, 261, pid, 1, new, ctypes.create_string_buffer(16))  # RLIMIT_FSIZE

def pair(type=socket.SOCK_STREAM):
    return socket.socketpair(socket.AF_UNIX, type)

def pass_on(type):
    ours, theirs = pair(type)
    ours.send(b"to its pair")
    assert theirs.recv(20) == b"to its pair"

def in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(error_of(lambda: limit_of(0))))
    thread.start()
    thread.join()
    if found[0]:
        raise OSError(found[0], "refused")

print([error_of(one) for one in (
    lambda: pass_on(socket.SOCK_STREAM), lambda: pass_on(socket.SOCK_STREAM | socket.SOCK_NONBLOCK),
    lambda: pass_on(socket.SOCK_SEQPACKET), lambda: limit_of(0), lambda: limit_of(os.getpid()), in_a_thread,
)])
print([error_of(one) for one in (
    lambda: pair(socket.SOCK_DGRAM)[0].sendto(b"secret", path),
    lambda: pair(socket.SOCK_RAW)[0].sendto(b"secret", path),  # the kernel makes it one of datagrams
    lambda: pair(socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)[0].sendto(b"secret", "\\0" + abstract),
    lambda: socket.socketpair(30, socket.SOCK_STREAM),  # TIPC's reach other machines
    lambda: limit_of(os.getppid()), lambda: limit_of(os.getppid(), struct.pack("QQ", 0, 0)),
    lambda: call(30, 196, shared, None, 0), lambda: call(29, 194, key, 4096, 0o600),
    lambda: call(68, 186, 0, 0o600), lambda: call(64, 190, 0, 1, 0o600),
    lambda: call(240, 180, b"charonia", os.O_RDWR | os.O_CREAT, 0o600, None),
    lambda: call(248, 217, b"user", b"charonia", b"secret", 6, -4), lambda: call(272, 97, 0x10000000),
)])
print([error_of(one) for one in (
    lambda: pair()[0].sendto(b"secret", path), lambda: pair(socket.SOCK_SEQPACKET)[0].sendto(b"secret", path),
)])
"""


@pytest.mark.skipif(not sandbox.is_available(), reason="this kernel has no Landlock")
def test_processes_of_the_same_user_are_out_of_reach(tmp_path: Path) -> None:
    """By no socket, limit, shared memory, queue or key (docs/adr/0085)."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    key = int.from_bytes(os.urandom(3), "little") + 1
    shared = libc.shmget(key, 4096, 0o1600)
    assert shared >= 0
    abstract = f"charonia-test-{os.getpid()}"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as by_path,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as by_name,
        ):
            by_path.bind(str(tmp_path / "outside"))
            by_name.bind("\0" + abstract)
            words = [str(temporary), str(tmp_path / "outside"), abstract, str(shared), str(key)]
            done = subprocess.run([sys.executable, "-c", OTHERS, *words], capture_output=True, text=True, check=False)
            for outside in (by_path, by_name):
                outside.setblocking(False)
                with pytest.raises(BlockingIOError):
                    outside.recv(100)
    finally:
        libc.shmctl(shared, 0, None)  # IPC_RMID
    assert done.returncode == 0, done.stderr
    allowed, refused, to_pairs = map(json.loads, done.stdout.splitlines())
    assert allowed == [0] * len(allowed)
    assert set(refused) <= {errno.EACCES, errno.EPERM}, refused
    assert 0 not in to_pairs, "such sockets send to their pair alone"
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == limit


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
