"""Who is asked for its health, what counts as an answer, and what is told (P6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from charonia.backend import InstanceDied, ModelSource, SelfCheckingInstance
from charonia.errors import InternalError, InvalidArgument
from executors.running.health import HealthWatch, interval_s
from protos.model_config_pb2 import ModelConfig


class Instance:
    checks_health = True

    def __init__(self, answer: bool | BaseException | None = True) -> None:
        self.answer = answer
        self.asked = 0

    async def check_health(self) -> bool:
        self.asked += 1
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return bool(self.answer)


def watch(*instances: Instance, **given: float) -> tuple[HealthWatch, list[bool]]:
    told: list[bool] = []

    async def tell(well: bool) -> None:
        told.append(well)

    named: list[tuple[str, SelfCheckingInstance]] = [(f"m_{index}", each) for index, each in enumerate(instances)]
    asks: Callable[[], Sequence[tuple[str, SelfCheckingInstance]]] = lambda: named  # noqa: E731
    return HealthWatch("m version 1", asks, tell, **{"period_s": 0.001, "timeout_s": 0.01, **given}), told


async def test_only_changes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    one, two = Instance(), Instance()
    watching, told = watch(one, two)
    await watching.check()
    assert told == []
    one.answer = False
    await watching.check()
    two.answer = False
    await watching.check()
    one.answer = True
    await watching.check()
    assert told == [False]
    two.answer = True
    await watching.check()
    assert told == [False, True]
    assert [record.getMessage() for record in caplog.records] == [
        "m version 1 is not ready, m_0: is_ready says no",
        "m version 1 is ready again",
    ]


@pytest.mark.parametrize(
    ("answer", "well", "text"),
    [
        (InternalError("no database"), False, "is_ready failed: no database"),
        (SystemExit(3), False, "is_ready failed: SystemExit: 3"),
        (asyncio.CancelledError("upstream"), False, "is_ready failed: CancelledError: upstream"),
        (None, False, "is_ready did not answer within 0.01 s"),
        (InstanceDied("gone"), True, ""),
    ],
)
async def test_what_counts_as_no(
    answer: BaseException | None, well: bool, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    watching, told = watch(Instance(answer))
    await watching.check()
    assert (watching.healthy, told) == (well, [] if well else [False])
    assert text in caplog.text


async def test_a_dead_instance_that_is_made_again_is_not_ready_until_it_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    instance = Instance(InstanceDied("its engine is dead"))
    watching, told = watch(instance)
    replaced: list[SelfCheckingInstance] = []
    watching._replace = lambda one: not replaced.append(one)
    down = False
    watching._all_down = lambda: down
    await watching.check()
    assert (watching.healthy, told, replaced) == (False, [False], [instance])
    assert "m_0: it died and is made again: its engine is dead" in caplog.text
    watching._idle_instances, asked = list, watching._idle_instances
    await watching.check()
    assert told == [False]
    watching._idle_instances, instance.answer, down = asked, True, True
    await watching.check()
    assert told == [False]
    down = False
    await watching.check()
    assert told == [False, True]


async def test_a_version_whose_instances_are_all_made_again_is_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    watching, told = watch()
    watching._all_down = lambda: True
    await watching.check()
    watching._all_down = lambda: False
    await watching.check()
    assert told == [False, True]
    assert "m version 1 is not ready, all instances: being made again" in caplog.text


async def test_an_instance_that_was_removed_keeps_no_version_from_being_ready() -> None:
    instance = Instance(False)
    watching, told = watch(instance)
    await watching.check()
    watching._idle_instances, watching._exists = list, lambda name: name != "m_0"
    await watching.check()
    assert told == [False, True]


async def test_the_last_answer_of_a_busy_instance_holds() -> None:
    instance = Instance(False)
    watching, told = watch(instance)
    await watching.check()
    watching._idle_instances = list
    await watching.check()
    assert (watching.healthy, told, instance.asked) == (False, [False], 1)


async def test_it_asks_again_and_again() -> None:
    instance = Instance()
    watching, _ = watch(instance)
    task = asyncio.create_task(watching.run())
    async with asyncio.timeout(30):
        while instance.asked < 3:
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_how_often_is_the_models_to_say() -> None:
    config = ModelConfig(name="m")
    source = ModelSource("m", 1, Path("/none"), config)
    assert interval_s(source) == 2
    config.parameters["charonia.health_interval_s"].string_value = "0.5"
    assert interval_s(source) == 0.5
    config.parameters["charonia.health_interval_s"].string_value = "often"
    with pytest.raises(InvalidArgument, match=r"'charonia\.health_interval_s' must be a number"):
        interval_s(source)
