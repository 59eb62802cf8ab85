"""Host policies: which cores they name, what is refused, and that threads keep to them (C11)."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from charonia.errors import StartupError
from charonia.models.interface import InstanceGroup
from executors.host.host_policy import HostPolicies, restrict_thread, thread_on

CORES = sorted(os.sched_getaffinity(0))
FIRST, LAST = CORES[0], CORES[-1]


def group(policy: str = "") -> InstanceGroup:
    return InstanceGroup("g", 1, "KIND_CPU", host_policy=policy)


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    for node, listed in ((0, f"{FIRST}\n"), (1, f"{FIRST}-{LAST}\n"), (2, "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(listed)
    return tmp_path


def test_policies_are_found_by_name_and_by_the_kind_of_instance() -> None:
    policies = HostPolicies({"p": {"cpu-cores": str(FIRST)}, "cpu": {"cpu-cores": f"{FIRST}-{LAST}"}})
    assert policies.cores(group("p"), "CPU", -1) == {FIRST}
    assert policies.cores(group(), "CPU", -1) == set(range(FIRST, LAST + 1))
    assert policies.cores(group("unknown"), "CPU", -1) == frozenset()
    assert policies.cores(group(), "MODEL", -1) == frozenset()
    gpu = HostPolicies({"gpu_1": {"cpu-cores": str(LAST)}, "model": {"cpu-cores": str(FIRST)}})
    assert gpu.cores(group(), "GPU", 1) == {LAST}
    assert gpu.cores(group(), "GPU", 0) == frozenset()
    assert gpu.cores(group(), "MODEL", -1) == {FIRST}


def test_a_node_is_its_cores_and_both_settings_meet(nodes: Path) -> None:
    policies = HostPolicies(
        {"zero": {"numa-node": "0"}, "both": {"numa-node": "1", "cpu-cores": f" {LAST}, {LAST}"}}, nodes
    )
    assert policies.cores(group("zero"), "CPU", -1) == {FIRST}
    assert policies.cores(group("both"), "CPU", -1) == {LAST}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"numa-node": "9"}, "this machine has no NUMA node 9"),
        ({"numa-node": "x"}, "numa-node must be a number, got 'x'"),
        ({"numa-node": "2"}, "leaves no core to run on"),
        ({"cpu-cores": "4095"}, "cores 4095 of cpu-cores '4095' are not this process's"),
        ({"cpu-cores": "3-1"}, "cpu-cores must be cores as in 0-3,8, got '3-1'"),
        ({"cpu-cores": "1,"}, "cpu-cores must be cores"),
        ({"cpu-cores": "-1"}, "cpu-cores must be cores"),
        ({"cpu-cores": "1-2-3"}, "cpu-cores must be cores"),
    ],
)
def test_what_cannot_be_used_keeps_the_executor_from_starting(
    nodes: Path, settings: dict[str, str], reason: str
) -> None:
    with pytest.raises(StartupError) as raised:
        HostPolicies({"p": settings}, nodes)
    assert "host policy 'p'" in str(raised.value)
    assert reason in str(raised.value)


def test_a_thread_and_what_it_starts_keep_to_their_cores() -> None:
    seen: list[set[int]] = []

    def work() -> None:
        with thread_on(frozenset({LAST})):
            inner = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
            inner.start()
            inner.join()
        seen.append(os.sched_getaffinity(0))
        restrict_thread(frozenset())
        seen.append(os.sched_getaffinity(0))
        restrict_thread(frozenset({FIRST}))
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [{LAST}, set(CORES), set(CORES), {FIRST}]
    assert os.sched_getaffinity(0) == set(CORES)
