"""When more or fewer instances are all that a configuration asks for (R23), and which of a sequence model leave."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from charonia.backend import InstanceSpec
from charonia.models.config_forms import parse
from charonia.models.interface import InstanceGroup, ModelInterface, ResourceNeed
from charonia.wire import BatchPlaces
from executors.loading.loader import change_of
from executors.running.instance_pool import InstancePool

CPU = InstanceGroup("m", 2, "KIND_CPU")
OTHER = InstanceGroup("m_1", 1, "KIND_CPU", host_policy="other")


def count(group: InstanceGroup, number: int) -> InstanceGroup:
    return replace(group, count=number)


@pytest.mark.parametrize(
    ("before", "after", "unbound", "bound"),
    [
        ([CPU], [count(CPU, 5)], 3, 3),
        ([CPU], [count(CPU, 1)], -1, -1),
        ([CPU], [CPU], 0, 0),
        ([CPU], [replace(CPU, name="other", count=3)], 1, 1),
        ([CPU, OTHER], [CPU, count(OTHER, 4)], 3, 3),
        # anybody who is free could leave, and not all are alike
        ([CPU, count(OTHER, 3)], [CPU, OTHER], 0, -2),
        # not the last: the numbers of those after it would be others
        ([CPU, OTHER], [count(CPU, 3), OTHER], 0, 0),
        ([CPU], [CPU, OTHER], 0, 0),
        ([CPU], [count(OTHER, 2)], 0, 0),
        ([CPU], [replace(CPU, count=3, kind="KIND_GPU", gpus=(0,))], 0, 0),
        ([CPU], [replace(CPU, count=3, resources=(ResourceNeed("r", 1, False),))], 0, 0),
        ([CPU], [replace(CPU, count=3, passive=True)], 0, 0),
        ([replace(CPU, passive=True)], [replace(CPU, count=3, passive=True)], 0, 0),
        ([replace(CPU, kind="KIND_GPU", gpus=(0,))], [replace(CPU, count=3, kind="KIND_GPU", gpus=(0,))], 1, 1),
        ([replace(CPU, gpus=(0, 1))], [replace(CPU, count=3, gpus=(0, 1))], 0, 0),
        ([], [], 0, 0),
    ],
)
def test_what_can_be_done_in_place(
    before: list[InstanceGroup], after: list[InstanceGroup], unbound: int, bound: int
) -> None:
    assert change_of(before, after, bound=False) == unbound
    assert change_of(before, after, bound=True) == bound


class Requests:
    def __init__(self) -> None:
        self.closed = False

    async def execute_requests(self, requests: Any) -> Any:
        raise NotImplementedError

    async def close_instance(self) -> None:
        self.closed = True


async def test_the_last_instances_of_a_sequence_model_leave_and_what_they_knew_with_them() -> None:
    interface = ModelInterface.of(parse('name: "m" backend: "python" sequence_batching { }'))

    async def never(spec: InstanceSpec) -> Any:
        raise NotImplementedError

    pool = InstancePool(interface, 1, never)
    instances = [Requests() for _ in range(3)]
    for number, instance in enumerate(instances):
        spec = InstanceSpec(f"m_{number}", "CPU", -1, SimpleNamespace(name="m"), interface)  # type: ignore[arg-type]
        pool.add(spec, instance)
    lives: list[int] = []
    pool.sequences = SimpleNamespace(begin=lambda places, records, life: lives.append(life))  # type: ignore[assignment]
    pool.start()
    pool.set_target(1)
    assert (pool.slots, pool.is_shrinking) == (1, True)
    await pool.shrink()
    assert (pool.slots, pool.is_shrinking, [spec.name for spec in pool.specs]) == (1, False, ["m_0"])
    assert [instance.closed for instance in instances] == [False, True, True]
    for number in (0, 1):
        places = BatchPlaces(number, 0, ())
        job = SimpleNamespace(header=SimpleNamespace(sequences=places), records=[], unwanted=frozenset(), put=None)
        pool.execution_of(job, 4)  # type: ignore[arg-type]
    assert lives == [4, 0], "a batch for one that has left is in a life that nobody remembers"
    await pool.close()
    assert instances[0].closed
