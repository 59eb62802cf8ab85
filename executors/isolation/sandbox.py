"""Takes from a process what a model does not need: other files, writing, the network, further processes. By ctypes.

Landlock restricts files, TCP and signals; seccomp refuses sockets of every family, new processes, and what processes of
one user share without files, which Landlock does not know or only in part (docs/adr/0085). Both count for the calling
thread and the threads it starts, so `enter` comes before anything that starts threads, as importing NumPy does. Only
the standard library is imported here (docs/adr/0032).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable, Sequence
from itertools import chain

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_CAPABILITY_VERSION = 0x20080522
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_FILTER = 38, 22, 2

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIRECTORY = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_IOCTL = 1 << 15
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: _IOCTL}
"""The rights over files that each version of Landlock added; what is handled and not granted is refused."""
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | (1 << 14) | _IOCTL
"""Those that can be granted for something that is no directory."""
_BIND_CONNECT_TCP, _NETWORK = 0b11, 4
_ABSTRACT_SOCKETS_AND_SIGNALS, _SCOPES = 0b11, 6
_READ = _EXECUTE | _READ_FILE | _READ_DIRECTORY
_RENAME_THREAD = _WRITE_FILE | (1 << 14)

_SYSTEM = (
    *("/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share", "/lib", "/lib64", "/proc"),
    *("/usr/local/cuda*", "/usr/local/nvidia", "/opt/cuda*", "/opt/rocm*", "/opt/nvidia", "/opt/intel"),
    *("/sys/devices", "/sys/fs/cgroup", "/sys/bus/pci", "/sys/module"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/os-release", "/etc/OpenCL"),
)
"""Where libraries lie, and what they read of the machine."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/nvidia*", "/dev/dri/*")
_MORE_DEVICES = ("/dev/nvidia-caps/*", "/dev/kfd", "/dev/accel/*")
_NVIDIA = "/dev/nvidiactl"
"""Where it is, NVIDIA's driver may be used; see `_grant_own_threads` and `_filter_system_calls` (docs/adr/0076)."""
_OWN_THREADS = "/proc/self/task"

_ALLOW, _REFUSE, _ABSENT = 0x7FFF0000, 0x00050000 | errno.EACCES, 0x00050000 | errno.ENOSYS
_CLONE_THREAD = 0x10000
_AF_UNIX, _AF_NETLINK = 1, 16
_STREAM, _SEQPACKET, _SOCKET_TYPES = 1, 5, 0xF
_LOAD, _EQUAL, _AT_LEAST, _ANY_OF, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_X32 = 0x40000000
_IO_URING = (425, 426, 427)
"""It makes sockets without a system call of its own."""
_CLONE3 = 435


class _Machine:
    """The numbers of system calls."""

    def __init__(
        self, architecture: int, socket: int, socketpair: int, clone: int, prlimit: int, others: Sequence[int]
    ) -> None:
        self.architecture, self.socket, self.socketpair = architecture, socket, socketpair
        self.clone, self.prlimit, self.others = clone, prlimit, others


_MACHINES = {
    # fork, vfork (arm64 has neither), ptrace, memory of other processes; connect, accept, accept4; unshare, setns;
    # shared memory, semaphores and queues of System V; queues of POSIX; keys
    "x86_64": _Machine(
        *(0xC000003E, 41, 53, 56, 302),
        (
            *(57, 58, 101, 310, 311, 42, 43, 288, 272, 308),
            *(29, 30, 31, 64, 65, 66, 220, 68, 69, 70, 71, 240, 241, 248, 249, 250),
        ),
    ),
    "aarch64": _Machine(
        *(0xC00000B7, 198, 199, 220, 261),
        (
            *(117, 270, 271, 203, 202, 242, 97, 268),
            *(194, 196, 195, 190, 193, 191, 192, 186, 189, 188, 187, 180, 181, 217, 218, 219),
        ),
    ),
}


def landlock_version() -> int:
    """The version of Landlock that the kernel has; 0 for none."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, _call(_CREATE_RULESET, None, 0, _VERSION))


def is_available() -> bool:
    """Whether `enter` would succeed here: Landlock knows TCP, and the numbers of system calls are known."""
    return landlock_version() >= _NETWORK and platform.machine() in _MACHINES


def enter(readable: Iterable[str], temporary: str, *, nvidia: bool | None = None) -> None:
    """Restrict this process for good: read `readable`, libraries and devices, write `temporary`, and nothing more.

    `nvidia`: allow what NVIDIA's driver needs besides its devices; None: where it has devices. Raises `OSError` when
    the kernel refuses.
    """
    nvidia = os.path.exists(_NVIDIA) if nvidia is None else nvidia
    version = landlock_version()
    rights = sum(added for since, added in _FILE_RIGHTS.items() if since <= version)
    network = _BIND_CONNECT_TCP if version >= _NETWORK else 0
    scopes = _ABSTRACT_SOCKETS_AND_SIGNALS if version >= _SCOPES else 0
    attributes = struct.pack("QQQ", rights, network, scopes)
    sizes = {1: 8, 2: 8, 3: 8, 4: 16, 5: 16}
    ruleset = _checked(_call(_CREATE_RULESET, attributes, sizes.get(version, len(attributes)), 0))
    try:
        for path in {*chain.from_iterable(map(glob.glob, _SYSTEM)), *_libraries(), *readable}:
            _grant(ruleset, path, _READ & rights)
        for pattern in (*_DEVICES, *_MORE_DEVICES):
            for node in glob.glob(pattern):
                _grant(ruleset, node, (_READ_FILE | _WRITE_FILE | _IOCTL) & rights)
        _grant(ruleset, temporary, rights)
        if nvidia:
            _grant_own_threads(ruleset, rights)
        _checked(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked(_call(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    _drop_capabilities()
    _filter_system_calls(nvidia=nvidia)


def limit_processes(more: int) -> None:
    """Let the user of this process have so many more tasks than now, and no core files.

    The kernel counts processes and threads of the user, and does not heed the limit for root.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = _count_tasks(os.getuid()) + more
    for bound in (soft, hard):
        if bound != resource.RLIM_INFINITY:
            limit = min(limit, bound)
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))


def _count_tasks(user: int) -> int:
    found = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == user:
                    found += len(os.listdir(f"/proc/{entry.name}/task"))
    return found


def _libraries() -> list[str]:
    """The directories that modules are imported from, the interpreter's own, and those of the dynamic linker."""
    linker = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    # setuptools finds packages of editable installations by a table, not by a path
    finders = [sys.modules.get(getattr(finder, "__module__", "")) for finder in sys.meta_path]
    editable = [str(path) for finder in finders for path in getattr(finder, "MAPPING", {}).values()]
    found = (*sys.path, *editable, sys.prefix, sys.base_prefix, sys.exec_prefix, *linker)
    return [os.path.realpath(path) for path in found if path]


def _grant(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what does not exist needs no leave
    try:
        if not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            rights &= _OF_FILES
        _checked(_call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0))
    finally:
        os.close(descriptor)


def _grant_own_threads(ruleset: int, rights: int) -> None:
    """Let this process write the names of its threads, as NVIDIA's driver does: it fails where it cannot (error 304).

    A rule is of an inode, which the kernel forgets unless something holds its entry: the descriptor stays open.
    """
    descriptor = os.open(_OWN_THREADS, os.O_PATH | os.O_CLOEXEC)
    _checked(_call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", _RENAME_THREAD & rights, descriptor), 0))


def _drop_capabilities() -> None:
    """Give root's privileges up: with them `/proc` shows other processes' memory, Landlock or not."""
    _checked(_LIBC.capset(struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)))


def _filter_system_calls(*, nvidia: bool) -> None:
    """Refuse sockets but for netlink's, every clone that is no thread, and limits of other processes.

    Event loops need socketpair. It stays for streams and packets, which reach their pair alone; a datagram can be sent
    from a pair to any path.

    NVIDIA's driver listens on a unix socket (SOCK_SEQPACKET, abstract) for those who share its memory, and fails where
    it cannot. It gets one that no process is let in by: connecting and accepting are refused to all sockets.
    """
    machine = _MACHINES[platform.machine()]
    refuse, allow = (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, machine.architecture),
        refuse,
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        refuse,
        (_EQUAL, 0, 1, _CLONE3),  # its flags lie in memory, where a filter cannot read; the C library then uses clone
        (_RETURN, 0, 0, _ABSENT),
    ]
    for number in (*machine.others, *_IO_URING):
        program += [(_EQUAL, 0, 1, number), refuse]
    sockets = [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 0, 1, _AF_NETLINK), allow]
    if nvidia:
        packets = [(_LOAD, 0, 0, _SECOND_ARGUMENT), (_AND, 0, 0, _SOCKET_TYPES), (_EQUAL, 0, 1, _SEQPACKET), allow]
        sockets += [(_EQUAL, 0, len(packets), _AF_UNIX), *packets]
    sockets.append(refuse)
    pairs = [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 1, 0, _AF_UNIX), refuse]
    pairs += [(_LOAD, 0, 0, _SECOND_ARGUMENT), (_AND, 0, 0, _SOCKET_TYPES)]
    pairs += [(_EQUAL, 1, 0, _STREAM), (_EQUAL, 0, 1, _SEQPACKET), allow, refuse]
    limits = [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 1, 0, 0), (_EQUAL, 0, 1, os.getpid()), allow, refuse]
    program += [
        (_EQUAL, 0, len(sockets), machine.socket),
        *sockets,
        (_EQUAL, 0, len(pairs), machine.socketpair),
        *pairs,
        (_EQUAL, 0, len(limits), machine.prlimit),
        *limits,
        (_EQUAL, 0, 4, machine.clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_OF, 0, 1, _CLONE_THREAD),
        allow,
        refuse,
        allow,
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    _checked(_LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_FILTER, header, 0, 0))


def _call(number: int, *arguments: object) -> int:
    words = [word if isinstance(word, bytes) or word is None else ctypes.c_long(word) for word in arguments]  # type: ignore[arg-type]
    return int(_LIBC.syscall(ctypes.c_long(number), *words))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


_LIBC = ctypes.CDLL(None, use_errno=True)
