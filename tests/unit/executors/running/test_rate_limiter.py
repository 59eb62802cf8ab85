"""Counts, limits and refusals of the rate limiter (Q1, Q3), and who goes ahead of whom."""

from __future__ import annotations

import pytest

from charonia.errors import InvalidArgument
from charonia.models.interface import ResourceNeed
from charonia.options.settings import EVERY_DEVICE
from executors.running.rate_limiter import GLOBAL, RateLimiter

LIMITED = (
    'Resource count for "r" is limited to {limit} which will prevent scheduling of one or more model instances, the '
    "minimum required count is {least}"
)


def test_without_limits_there_is_as_much_as_the_largest_need() -> None:
    limiter = RateLimiter()
    limiter.register("a", [ResourceNeed("r", 2), ResourceNeed("g", 1, True)], 0, 0)
    limiter.register("b", [ResourceNeed("r", 5)], 0, 0)
    limiter.register("c", [ResourceNeed("r", 3)], 0, 1)
    assert limiter.counts() == {(0, "r"): 5, (1, "r"): 3, (GLOBAL, "g"): 1}
    limiter.unregister("b")
    assert limiter.counts() == {(0, "r"): 2, (1, "r"): 3, (GLOBAL, "g"): 1}


@pytest.mark.parametrize(
    ("limits", "device", "is_global", "limit"),
    [
        ({(EVERY_DEVICE, "r"): 3}, 0, False, 3),
        ({(1, "r"): 9}, 0, False, 0),
        ({(1, "r"): 3}, 1, False, 3),
        ({(1, "r"): 1, (EVERY_DEVICE, "r"): 3}, 1, False, 3),
        ({(EVERY_DEVICE, "other"): 9}, 0, False, 0),
        ({(7, "r"): 3}, 0, True, 3),
        ({(EVERY_DEVICE, "r"): 2}, -1, False, 2),
    ],
)
def test_what_could_never_run_is_refused(
    limits: dict[tuple[int, str], int], device: int, is_global: bool, limit: int
) -> None:
    limiter = RateLimiter(limits)
    with pytest.raises(InvalidArgument) as raised:
        limiter.register("a", [ResourceNeed("r", 4, is_global)], 1, device)
    assert raised.value.message == LIMITED.format(limit=limit, least=4)
    assert limiter.counts() == {}
    if limit:
        limiter.register("a", [ResourceNeed("r", limit, is_global)], 1, device)


def test_a_resource_is_global_or_of_devices() -> None:
    limiter = RateLimiter()
    limiter.register("a", [ResourceNeed("r", 1)], 1, 0)
    with pytest.raises(InvalidArgument) as raised:
        limiter.register("b", [ResourceNeed("r", 1, True)], 1, 0)
    assert raised.value.message == (
        'Resource "r" is present as both global and device-specific resource in the model configuration.'
    )


def test_an_instance_without_needs_never_waits() -> None:
    limiter = RateLimiter()
    limiter.register("free", [], 1, 0)
    limiter.register("a", [ResourceNeed("r", 1)], 1, 0)
    limiter.register("b", [ResourceNeed("r", 1)], 1, 0)
    for key in ("b", "a", "free"):
        limiter.ask(key)
    assert limiter.grant() == ["b", "free"]


def test_devices_have_resources_of_their_own_and_share_global_ones() -> None:
    limiter = RateLimiter({(EVERY_DEVICE, "r"): 1, (EVERY_DEVICE, "g"): 1})
    for key, device in (("a", 0), ("b", 1), ("c", 1)):
        limiter.register(key, [ResourceNeed("r", 1)], 1, device)
    limiter.register("d", [ResourceNeed("g", 1, True)], 1, 0)
    limiter.register("e", [ResourceNeed("g", 1, True)], 1, 1)
    for key in "abcde":
        limiter.ask(key)
    assert limiter.grant() == ["a", "b", "d"]
    limiter.release("b")
    limiter.release("d")
    assert limiter.grant() == ["c", "e"]


def test_who_waits_for_more_keeps_it_from_those_behind() -> None:
    limiter = RateLimiter({(0, "r"): 2, (0, "s"): 1})
    limiter.register("small", [ResourceNeed("r", 1)], 1, 0)
    limiter.register("large", [ResourceNeed("r", 2)], 1, 0)
    limiter.register("other", [ResourceNeed("s", 1)], 1, 0)
    limiter.register("late", [ResourceNeed("r", 1)], 1, 0)
    limiter.ask("small")
    assert limiter.grant() == ["small"]
    for key in ("large", "other", "late"):
        limiter.ask(key)
    assert limiter.grant() == ["other"]  # what it needs nobody waits for
    limiter.release("small")
    assert limiter.grant() == ["large"]
    limiter.release("large")
    assert limiter.grant() == ["late"]
