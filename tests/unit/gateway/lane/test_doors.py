"""Who may ride: which requests have a door, what has to be there for it, and what closes doors again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lane_bench import GATEWAY, MODEL, Front, LaneBench

from charonia.clock import monotonic_ns
from charonia.errors import EPOCH_CHANGED, SERVER_EXITING
from charonia.facts.events import ProcessJoined, ProcessLeft, VersionUnloaded
from charonia.inference import InferenceRequest, RegionPart, RegionUse
from gateway.lane.door import Door
from gateway.lane.gathering import SLOW_NS


@pytest.fixture
def bench() -> Iterator[LaneBench]:
    with LaneBench() as bench:
        yield bench


# -- which requests ----------------------------------------------------------------------------------------------------


def test_requests_that_differ_in_their_values_and_ids_share_a_door(bench: LaneBench) -> None:
    door = bench.door()
    assert door is not None
    assert bench.door(value=2, id="another") is door
    assert bench.service.lane.is_open


@pytest.mark.parametrize(
    "fields",
    [{"width": 2}, {"batch": 2}, {"timeout_us": 5}, {"parameters": {"k": "v"}}, {"outputs": ("y",)}],
    ids=str,
)
def test_requests_that_differ_in_anything_else_have_doors_of_their_own(
    bench: LaneBench, fields: dict[str, Any]
) -> None:
    other = bench.door(**fields)
    assert other is not None
    assert other is not bench.door()
    assert other is bench.door(**fields)
    assert other.gathering is bench.front().door.gathering, "they leave together"


@pytest.mark.parametrize(
    "request_",
    [
        lambda bench: bench.request(deadline_ns=1),
        lambda bench: bench.request(sequence_id=1),
        lambda bench: InferenceRequest(MODEL, -1, []),
        lambda bench: InferenceRequest("another", -1, bench.request().inputs),
        lambda bench: InferenceRequest(MODEL, 2, bench.request().inputs),
        lambda bench: bench.request(batch=9),
        lambda bench: bench.request(width=4097),
        lambda bench: bench.text_request(b"\0\0\0\0"),
        lambda bench: bench.request(parameters={"k": 1.5}, outputs=("z",)),
        lambda bench: bench.request(regions=RegionUse({}, {"y": RegionPart("r", 0, 16)})),
    ],
    ids=[
        "deadline",
        "sequence",
        "no inputs",
        "no model",
        "no version",
        "refused",
        "large",
        "other type",
        "no output",
        "shared memory",
    ],
)
def test_what_has_to_be_read_each_time_has_no_door(
    bench: LaneBench, request_: Callable[[LaneBench], InferenceRequest]
) -> None:
    assert bench.now(lambda: bench.service.lane.door_for(request_(bench))) is None
    assert not bench.service.lane.is_open


def test_requests_that_may_be_recorded_are_read_in_full() -> None:
    share = 'parameters { key: "charonia.record_share" value { string_value: "0.001" } }'
    with LaneBench(block=f"dynamic_batching {{ }} {share}") as bench:
        assert bench.now(lambda: bench.service.lane.door_for(bench.request())) is None


def test_the_largest_request_that_rides(bench: LaneBench) -> None:
    assert bench.door(width=4096) is not None


def test_requests_of_bytes_are_read_in_full_and_ride_all_the_same() -> None:
    with LaneBench(datatype="TYPE_STRING") as bench:
        request = bench.text_request(b"\1\0\0\0a")
        assert bench.now(lambda: bench.service.lane.door_for(request)) is None
        asked = bench.begin(bench.service.infer(request))
        bench.settle()
        (sent,) = bench.sent()
        bench.answer_one(sent.wave.ids()[0], 5)
        assert asked.result().outputs[0].array()[0, 0] == 5


# -- which models and gateways -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"express_lane": False}, {"journal": "all"}])
def test_gateways_without_a_lane(settings: dict[str, Any]) -> None:
    with LaneBench(**settings) as bench:
        assert bench.door() is None
        assert not bench.service.lane.is_on
        assert not bench.service.lane.may_learn(MODEL, 4)


@pytest.mark.parametrize(("cache_bytes", "has_door"), [(1 << 20, False), (0, True)])
def test_requests_that_may_be_answered_from_the_cache_have_no_door(cache_bytes: int, has_door: bool) -> None:
    block = "dynamic_batching { } response_cache { enable: true }"
    with LaneBench(block, response_cache_size_bytes=cache_bytes) as bench:
        assert (bench.door() is not None) == has_door


def test_a_model_whose_executors_take_no_waves_has_no_door(bench: LaneBench) -> None:
    assert bench.door() is not None
    bench.run(bench.tell(bench.loaded(takes_waves=False)))
    assert bench.door() is None


def test_each_level_is_a_queue_of_its_own_that_its_first_request_opens() -> None:
    with LaneBench("dynamic_batching { priority_levels: 2 default_priority_level: 1 }", level=1) as bench:
        door = bench.door()
        assert door is not None
        assert bench.door(priority=1) is door
        assert bench.door(priority=2) is None, "no request has opened it"


# -- what has to be there ----------------------------------------------------------------------------------------------


def test_room_is_reserved_before_the_first_door_opens() -> None:
    with LaneBench(ready=False) as bench:
        bench.run(bench.tell(*bench.facts()))
        assert bench.door() is None
        assert not bench.waves.leases.has(MODEL), "its queue is not open"
        bench.run(bench.open_queue())
        assert bench.door() is None
        bench.settle()
        assert bench.waves.leases.has(MODEL)
        assert bench.door() is not None


def test_room_is_asked_for_again_where_the_log_was_away() -> None:
    with LaneBench(ready=False) as bench:
        bench.run(bench.tell(*bench.facts()))
        bench.run(bench.open_queue())
        bench.gate.is_away = True
        for _ in range(3):
            assert bench.door() is None
            bench.settle()
        bench.gate.is_away = False
        found = []
        for _ in range(3):
            found.append(bench.door())
            bench.settle()
        assert found[-1] is not None


@pytest.mark.parametrize(
    ("batchers", "has_door"),
    [
        ([], False),
        ([ProcessJoined("batcher", "x", reads_waves=True)], True),
        ([ProcessJoined("batcher", "x")], False),
        ([ProcessJoined("batcher", "x", reads_waves=True), ProcessJoined("batcher", "y")], False),
        ([ProcessJoined("executor", "x", hosts_batcher=True, reads_waves=True)], True),
        ([ProcessJoined("executor", "x", hosts_batcher=True)], False),
        ([ProcessJoined("batcher", "x", reads_waves=True), ProcessJoined("executor", "y")], True),
    ],
)
def test_every_batcher_has_to_read_waves(bench: LaneBench, batchers: list[ProcessJoined], has_door: bool) -> None:
    bench.run(bench.tell(ProcessLeft("batcher", "b", "drained"), *batchers))
    assert (bench.door() is not None) == has_door


# -- what closes doors -------------------------------------------------------------------------------------------------


def watched(bench: LaneBench) -> tuple[Door, list[Door]]:
    """An open door, and those that fronts are told have closed."""
    closed: list[Door] = []
    bench.service.lane.fronts.append(closed.append)
    return bench.front().door, closed


@pytest.mark.parametrize(
    "change",
    [
        lambda bench: [bench.loaded("another incarnation")],
        lambda bench: [VersionUnloaded("e", MODEL, 1)],
        lambda _: [ProcessJoined("batcher", "of an older release")],
        lambda _: [ProcessLeft("executor", "e", "lost")],
    ],
    ids=["loaded", "unloaded", "older batcher", "executor lost"],
)
def test_what_may_lead_elsewhere_closes_all_doors(bench: LaneBench, change: Callable[[LaneBench], list[Any]]) -> None:
    door, closed = watched(bench)
    other = bench.door(timeout_us=5)
    bench.run(bench.tell(*change(bench)))
    assert closed == [door, other]
    assert door.is_closed
    assert not bench.service.lane.is_open


def test_a_new_incarnation_has_new_doors(bench: LaneBench) -> None:
    door, _ = watched(bench)
    bench.run(bench.tell(bench.loaded("another")))
    found = bench.door()
    assert found is not None
    assert found is not door
    assert (door.served.content_hash, found.served.content_hash) == ("h", "another")
    assert found.gathering is not door.gathering, "it may be quicker or slower"


@pytest.mark.parametrize(
    "fact",
    [
        ProcessJoined("batcher", "another", reads_waves=True),
        ProcessJoined("gateway", "another"),
        ProcessLeft("gateway", "another", "lost"),
        ProcessLeft("batcher", "b", "lost"),
    ],
)
def test_other_processes_come_and_go_without_a_word(bench: LaneBench, fact: ProcessJoined | ProcessLeft) -> None:
    door, closed = watched(bench)
    bench.run(bench.tell(fact))
    assert closed == []
    assert bench.door() is door
    assert bench.waves.leases.has(MODEL)


def test_a_gateway_that_was_taken_for_lost_reserves_room_anew(bench: LaneBench) -> None:
    front = bench.front()
    bench.run(bench.tell(ProcessLeft("gateway", GATEWAY, "lost")))
    assert not bench.waves.leases.has(MODEL)
    front.send(1)
    assert front.answers == ["left"]
    bench.settle()
    front.send(2)
    assert bench.values() == [[2]]


def test_a_draining_gateway_recognises_nothing_and_answers_what_is_under_way(bench: LaneBench) -> None:
    front = bench.front()
    front.send(1)
    bench.service.lane.begin_drain()
    assert front.door.is_closed
    assert bench.door() is None
    assert not bench.service.lane.may_learn(MODEL, 4)
    bench.answer()
    assert front.answers == [1]


def test_another_log_knows_nothing_of_waves_leases_and_queues(bench: LaneBench) -> None:
    front = bench.front()
    front.send(1)
    bench.settle()
    bench.service.lane.begin_anew()
    assert [str(error) for error in front.answers] == [EPOCH_CHANGED]
    assert bench.is_quiet()
    assert not bench.waves.leases.has(MODEL)
    assert front.door.is_closed
    assert bench.run(bench.waves.leases.reserve(MODEL))
    assert bench.door() is None, "its queue has to be opened again"
    bench.run(bench.log.delete_stream(bench.stream))
    bench.run(bench.open_queue())
    assert bench.door() is not None


def test_a_gateway_that_ends_answers_what_is_under_way_and_gives_its_leases_back(bench: LaneBench) -> None:
    front = bench.front()
    front.send(1)
    bench.settle()
    bench.run(bench.service.lane.close())
    assert [str(error) for error in front.answers] == [SERVER_EXITING]
    assert front.door.is_closed
    assert bench.door() is None
    assert bench.run(bench.log.waves.leases(MODEL)) == []


def test_a_model_that_was_too_slow_is_tried_again_later(bench: LaneBench) -> None:
    front = bench.front()
    for value in range(4):
        front.send(value)
        bench.answer(infer_ns=SLOW_NS + 1)
    assert bench.door() is None
    assert bench.door(timeout_us=5) is None, "nor has any other request of it"
    front.door.gathering.closed_until_ns = monotonic_ns() - 1
    found = bench.door()
    assert found is not None
    assert found.gathering is front.door.gathering


def test_there_are_no_more_than_a_thousand_doors(bench: LaneBench) -> None:
    _, closed = watched(bench)
    lane = bench.service.lane
    opened = bench.now(lambda: [lane.door_for(bench.request(timeout_us=1 + n)) for n in range(1023)])
    assert closed == []
    doors = [door for door in opened if door is not None]
    assert len(doors) == 1023
    before = {door.key for door in lane._doors()}
    for at, door in enumerate(doors):
        door.used_ns = 10**9 + (at - 200) % 1023  # that with index 200 was used first
    doors[200].waiting.append(Front(bench, doors[200]).call(7))
    found = bench.door(width=2)
    assert found is not None
    assert closed[0] is not doors[200], "requests wait there"
    assert len(closed) == 128
    assert {id(door) for door in doors[201:328]} <= set(map(id, closed)), "those that were used least recently"
    assert all(door.is_closed for door in closed)
    assert {door.key for door in lane._doors()} == before - {door.key for door in closed} | {found.key}
    assert found.gathering is doors[0].gathering is doors[200].gathering, "they still leave together"
    doors[200].waiting.clear()


# -- which are looked at -----------------------------------------------------------------------------------------------


def test_of_requests_that_always_go_the_full_way_few_are_looked_at(
    bench: LaneBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 10**12
    monkeypatch.setattr("gateway.lane.doors.monotonic_ns", lambda: now_ns)
    lane = bench.service.lane

    def looks(count: int, size_bytes: int = 4) -> int:
        return sum(lane.may_learn(MODEL, size_bytes) for _ in range(count))

    assert looks(100) == 16
    assert looks(100, size_bytes=5) == 16, "requests of another size may be others"
    now_ns += 100_000_000
    assert looks(1) == 0
    now_ns += 1
    assert looks(100) == 16


def test_sizes_are_remembered_within_bounds(bench: LaneBench) -> None:
    lane = bench.service.lane
    for size_bytes in range(5000):
        assert lane.may_learn(MODEL, size_bytes)
    assert len(lane._tried) <= 4096
