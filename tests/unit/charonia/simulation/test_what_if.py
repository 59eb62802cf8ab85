"""Questions in words, and what they make of a setting and its load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from charonia.errors import InvalidArgument
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching, TimeoutAction
from charonia.simulation.recorded_requests import RecordedRequest
from charonia.simulation.simulated_run import Setting
from charonia.simulation.what_if import changed, duration_us, named_models, settings_text, what_if

BLOCK = DynamicBatching(preferred_batch_sizes=(4, 8), max_queue_delay_us=100)
SETTING = Setting(ModelInterface("m", "", "", 8, {}, {}, dynamic_batching=BLOCK), 1, 2)
ARRIVALS = [RecordedRequest(at) for at in (1000, 1300, 1900)]


def after(text: str) -> Setting:
    return changed(SETTING, ARRIVALS, what_if(text))[0]


def test_each_change() -> None:
    assert after("executors=+2").executors == 3
    assert after("executors=4").executors == 4
    assert (after("executors=1").prefetch, after("executors=2").prefetch) == (0, 1)  # as `serve` gives them batches
    apart = replace(SETTING, executors=2, prefetch=1, keeps_apart=True)
    assert changed(apart, ARRIVALS, what_if("executors=1"))[0].prefetch == 1  # it is started as before
    assert after("instances=-1").instances == 1
    for text in ("batcher=separate", "batcher=separate executors=2 executors=1", "executors=1 batcher=separate"):
        assert (after(text).prefetch, after(text).keeps_apart) == (1, True)
    colocated = changed(apart, ARRIVALS, what_if("executors=1 batcher=colocated"))[0]
    assert (colocated.prefetch, colocated.keeps_apart) == (0, False)
    found = after("delay=5ms max-batch=6 instances=3")
    assert settings_text(found) == "executors=1 instances=3 max-batch=6 delay=5000us preferred=4"
    assert settings_text(after("cores=1.5")) == (
        "executors=1 instances=2 max-batch=8 cores=1.5 delay=100us preferred=4,8"
    )
    assert after("preferred=2,6").interface.dynamic_batching == DynamicBatching((2, 6), 100)
    assert after("preferred=none").interface.dynamic_batching == DynamicBatching((), 100)
    assert after("policy=none").interface.dynamic_batching is None
    block = after("policy=max-queue:64,timeout:20ms,action:delay,override:yes,order:yes").interface.dynamic_batching
    assert block is not None
    policy = block.default_queue_policy
    assert (policy.max_queue_size, policy.default_timeout_us, policy.timeout_action) == (
        64,
        20_000,
        TimeoutAction.DELAY,
    )
    assert policy.allow_timeout_override
    assert block.preserve_ordering


def test_the_rate_divides_the_distances() -> None:
    setting, arrivals = changed(SETTING, ARRIVALS, what_if("rate=x3"))
    assert setting == SETTING
    assert [one.arrived_ns for one in arrivals] == [1000, 1100, 1300]


def test_a_word_may_name_its_model() -> None:
    assert after("other:instances=9 m:delay=1ms").instances == 2
    with pytest.raises(InvalidArgument, match="'other', of which nothing was recorded"):
        named_models([what_if("other:instances=9")], {"m": 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one change"), ("speed=2", "no change"), ("delay", "no change"), ("delay=fast", "no time"),
        ("instances=0", "whole number"), ("executors=two", "whole number"), ("rate=x0", "no factor"),
        ("rate=nan", "no factor"), ("policy=hurry", "is not none or"), ("policy=action:wait", "no policy"),
        ("preferred=2,x", "whole number"), ("max-batch=-1", "whole number"),
        ("cores=0", "no number from 0.01"), ("cores=nan", "no number from 0.01"), ("cores=all", "no number from 0.01"),
        ("batcher=auto", "neither separate nor"), ("cores=1e-320", "no number from 0.01"), ("cores=20000", "to 10000"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        what_if(text)


def test_no_instance_is_left() -> None:
    with pytest.raises(InvalidArgument, match="at least 1"):
        after("instances=-2")


def test_several_executors_share_a_batcher() -> None:
    with pytest.raises(InvalidArgument, match="batcher=colocated needs executors=1"):
        after("executors=2 batcher=colocated")


def test_times() -> None:
    assert [duration_us("delay", text) for text in ("5ms", "500us", "1s", "2", "1.5ms")] == [
        5000, 500, 1_000_000, 2000, 1500,
    ]  # fmt: skip
