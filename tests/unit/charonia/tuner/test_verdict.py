"""Scores, the Pareto front, the choice among finalists, and the reasons."""

from __future__ import annotations

from typing import Any

import pytest

from charonia.tuner.verdict import (
    Aim,
    Score,
    best_level,
    confirmed,
    failure,
    figures,
    front,
    improves,
    is_within,
    overlap,
    ranked,
    reasons,
    score_of,
    stays_unheard,
    typical_turn,
    with_memory_of,
)

MIB = 1 << 20


def level(rate: float, latency_ms: float, *, failed: int = 0, **server: float) -> dict[str, Any]:
    at_server = {"inferences": 100, "executions": 50, "queue_us": 1000, "compute_infer_us": 2000, "cache_hits": 0}
    return {
        "level": 8, "rate": rate, "stable": True, "errors": {"bad": failed} if failed else {},
        "latency_us": {"judged": latency_ms * 1000}, "server": {"m": {**at_server, "requests": 100, **server}},
    }  # fmt: skip


def seen(*levels: dict[str, Any], mib: float = 100, failed: str = "") -> dict[str, Any]:
    return {"targets": {"m": list(levels)}, "memory": {"bytes": mib * MIB}, "failed": failed}


def test_limits_come_before_the_objective() -> None:
    aim = Aim("rate", 99, 20_000, 200 * MIB)
    slow, large, good = seen(level(90, 30)), seen(level(80, 10), mib=400), seen(level(10, 20), mib=200)
    none, failed = seen(failed="no server"), seen(level(99, 1, failed=3))
    assert ranked({"slow": slow, "large": large, "good": good, "none": none, "failed": failed}, aim) == [
        "good", "slow", "large",
    ]  # fmt: skip
    assert is_within(score_of(good, aim))
    assert not is_within(score_of(slow, aim))
    assert score_of(slow, aim).value == pytest.approx(-1.5)  # by how far
    assert score_of(none, aim) == score_of(failed, aim) == Score(0, 0.0)


def test_a_failure_is_the_servers_or_the_most_frequent_one_of_requests() -> None:
    assert failure(seen(failed="no server")) == "no server"
    two = {**level(0, 0), "errors": {"rare": 1, "frequent": 5}}
    assert failure(seen(two, level(0, 0, failed=2))) == "frequent"
    assert failure(seen(level(10, 5))) == ""
    both = {"targets": {"a": [level(10, 5)], "b": [level(30, 9)]}, "failed": ""}
    assert figures(both, 0, "b")["rate"] == 30  # of one model alone
    assert figures(both, 0, "a")["latency_us"] == 5000


def test_the_best_level_counts() -> None:
    found = seen(level(10, 5), level(30, 12), level(40, 50))
    assert best_level(found, Aim("rate", 99, 20_000)) == 1
    assert best_level(found, Aim("rate")) == 2
    assert score_of(found, Aim("latency")) == Score(2, -5000)
    assert score_of(found, Aim("memory")) == Score(2, -100 * MIB)


def test_several_models_count_alike() -> None:
    found = seen(level(4, 5)) | {"targets": {"a": [level(4, 5)], "b": [level(100, 9)]}}
    assert figures(found, 0) == pytest.approx({"rate": 20, "latency_us": 9000, "memory_bytes": 100 * MIB})


@pytest.mark.parametrize(("new", "old", "better"), [
    ((2, 104.0), (2, 100.0), True), ((2, 102.0), (2, 100.0), False), ((2, 1.0), (1, -1.1), True),
    ((1, -1.1), (1, -2.0), True), ((2, -96.0), (2, -100.0), True), ((2, -98.0), (2, -100.0), False),
    ((0, 0.0), (0, 0.0), False),
])  # fmt: skip
def test_better_is_by_more_than_the_gain(new: tuple[int, float], old: tuple[int, float], better: bool) -> None:
    assert improves(Score(*new), Score(*old), 0.03) is better


def test_the_front_has_what_no_other_beats() -> None:
    found = {
        "fast": seen(level(100, 20)), "quick": seen(level(50, 5)), "small": seen(level(20, 30), mib=50),
        "beaten": seen(level(50, 6)), "failed": seen(failed="no"), "same": seen(level(50, 5)),
    }  # fmt: skip
    assert front(found, Aim()) == ["fast", "quick", "same", "small"]


def test_the_median_of_turns_decides_and_the_written_one_stays_without_a_gain() -> None:
    rates = {"base": (100, 102, 98), "lucky": (150, 90, 91), "better": (110, 111, 60)}
    turns = [{name: seen(level(values[at], 5)) for name, values in rates.items()} for at in range(3)]
    assert confirmed(turns[:2], "base", Aim(), 0.03)[0] == "better"  # lucky's median is more, by one round
    assert confirmed(turns, "base", Aim(), 0.03)[0] == "base"  # better in two of three
    assert confirmed(turns[:2], "base", Aim(), 0.2)[0] == "base"
    failed = [{**turn, "better": seen(failed="gone")} for turn in turns[:2]] + turns[2:]
    assert confirmed(failed, "base", Aim(), 0.03) == (
        "base", {"base": Score(2, 100), "lucky": Score(2, 91), "better": Score(0, 0.0)},
    )  # fmt: skip


@pytest.mark.parametrize(("lost", "rounds", "winner"), [
    (0, 3, "new"), (1, 3, "base"), (1, 4, "base"), (1, 5, "new"), (2, 5, "base"), (2, 9, "base"),
])  # fmt: skip
def test_the_winner_wins_nearly_all_rounds(lost: int, rounds: int, winner: str) -> None:
    turns = [{"base": seen(level(100, 5)), "new": seen(level(90 if at < lost else 120, 5))} for at in range(rounds)]
    assert confirmed(turns, "base", Aim(), 0.03)[0] == winner
    assert overlap(turns, "base", "new", Aim()) is (lost > 0)
    assert not overlap([], "base", "new", Aim())


def test_a_written_one_beyond_a_limit_does_not_stay() -> None:
    turns = [{"base": seen(level(100, was)), "new": seen(level(100, now))} for was, now in ((9, 5), (9, 5), (9, 20))]
    assert confirmed(turns, "base", Aim("rate", 99, 8_000), 0.03)[0] == "new"


def test_a_written_one_that_fails_in_turns_alone_is_not_heard() -> None:
    aim, good, none = Aim("rate", 99, 8_000), seen(level(100, 5)), seen(failed="gone")
    turns = [{"base": found, "new": good} for found in (good, none, none)]
    assert "failed in 2 of 3 rounds" in stays_unheard(turns, "base", good, aim)
    assert stays_unheard(turns[:1], "base", good, aim) == ""
    for trial in (none, seen(level(100, 9))):  # one that cannot stay in any case
        assert stays_unheard(turns, "base", trial, aim) == ""


def test_the_larger_memory_counts() -> None:
    alone, shared, failed = seen(level(1, 1), mib=100), seen(level(2, 1), mib=60), seen(failed="no")
    found = with_memory_of(shared, alone)
    assert (found["memory"], found["targets"]) == ({"bytes": 100 * MIB}, shared["targets"])
    assert with_memory_of(alone, shared) == alone
    assert with_memory_of(failed, alone) == failed


def test_the_typical_turn_has_the_median_ratio() -> None:
    pairs = [(100, 300), (100, 120), (80, 88), (10, 0)]
    turns = [{"base": seen(level(was, 5)), "new": seen(level(now, 5))} for was, now in pairs]
    assert typical_turn(turns, "base", "new", Aim()) is turns[1]
    assert typical_turn(turns[3:], "base", "new", Aim()) is None


def test_reasons() -> None:
    base = seen(level(100, 20))
    winner = seen(level(150, 10, executions=20, queue_us=4000, cache_hits=30))
    said = reasons(base, winner, [("instances", "1", "2")], Aim())
    assert said == [
        "Changed: instances from 1 to 2.",
        "Rate +50 %, p99 latency -50 %, memory +0 %.",
        "m: a batch has 5.0 inferences on average, as written 2.0.",
        "m: a request waits in the queue for 4.0 ms, as written 1.0 ms.",
        "m: 30 % of requests are answered by the cache.",
    ]
    assert "could not be measured: no server" in reasons(seen(failed="no server"), winner, [("a", "1", "2")], Aim())[1]
    assert reasons(base, base, [], Aim())[0].startswith("No measured configuration was better")
