"""Host policies (C11): the CPU cores on which instances run.

`numa-node` means the cores of that node; memory follows, because Linux allocates it on the node of the thread that
touches it first. This module restricts threads; a child process is restricted by the code that starts it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from charonia.errors import StartupError
from charonia.models.interface import InstanceGroup

NODES = Path("/sys/devices/system/node")

_ANY: frozenset[int] = frozenset()


class HostPolicies:
    """Maps policy names to cores. Raises `StartupError` at start for cores or nodes that this process cannot use."""

    def __init__(self, policies: Mapping[str, Mapping[str, str]], nodes: Path = NODES) -> None:
        self._cores: dict[str, frozenset[int]] = {}
        for name, settings in policies.items():
            if not hasattr(os, "sched_setaffinity"):
                raise StartupError("--host-policy needs an operating system that restricts threads to cores: Linux")
            usable = os.sched_getaffinity(0)
            cores = frozenset(usable)
            if (node := settings.get("numa-node")) is not None:
                cores &= _of_node(name, node, nodes)
            if (written := settings.get("cpu-cores")) is not None:
                wanted = _listed(name, "cpu-cores", written)
                if not wanted <= usable:
                    raise StartupError(
                        f"host policy '{name}': cores {_text(wanted - usable)} of cpu-cores '{written}' are not this "
                        f"process's, which may use {_text(usable)}"
                    )
                cores &= wanted
            if not cores:
                raise StartupError(f"host policy '{name}' leaves no core to run on")
            self._cores[name] = cores

    def cores(self, group: InstanceGroup, kind: str, device: int) -> frozenset[int]:
        """The cores of an instance; empty: no restriction. The default policies are gpu_<id>, cpu and model."""
        default = {"GPU": f"gpu_{device}", "CPU": "cpu", "MODEL": "model"}[kind]
        return self._cores.get(group.host_policy or default, _ANY)


def restrict_thread(cores: frozenset[int]) -> None:
    """Restrict the calling thread, and threads it starts later, to these cores. Empty: do nothing."""
    if cores:
        os.sched_setaffinity(0, cores)


@contextmanager
def thread_on(cores: frozenset[int]) -> Iterator[None]:
    """A context in which the thread is restricted to these cores. Threads started in it keep them."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _of_node(policy: str, node: str, nodes: Path) -> frozenset[int]:
    if not (node.isascii() and node.isdecimal()):
        raise StartupError(f"host policy '{policy}': numa-node must be a number, got '{node}'")
    try:
        listed = (nodes / f"node{int(node)}" / "cpulist").read_text().strip()
    except OSError:
        raise StartupError(f"host policy '{policy}': this machine has no NUMA node {node}") from None
    return _listed(policy, f"numa-node {node}", listed) if listed else _ANY


def _listed(policy: str, what: str, text: str) -> frozenset[int]:
    """Parse cores such as `0-3,8`."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = (first, last) if dash else (first, first)
        if not all(n.isascii() and n.isdecimal() and len(n) < 6 for n in numbers) or int(numbers[0]) > int(numbers[1]):
            raise StartupError(f"host policy '{policy}': {what} must be cores as in 0-3,8, got '{text}'")
        cores.update(range(int(numbers[0]), int(numbers[1]) + 1))
    return frozenset(cores)


def _text(cores: frozenset[int] | set[int]) -> str:
    return ",".join(map(str, sorted(cores)))
