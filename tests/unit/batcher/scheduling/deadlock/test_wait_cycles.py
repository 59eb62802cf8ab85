"""Who waits for whom: the cases one can draw."""

from __future__ import annotations

from collections.abc import Mapping

from batcher.scheduling.deadlock.wait_cycles import Lack, stuck_calls
from batcher.scheduling.deadlock.waits import CalledRequest, Holder, Situation, SlotGroup, Step

A, B, C = ("a", 1), ("b", 1), ("c", 1)


def holder(version: tuple[str, int], *ids: str, executor: str = "e") -> Holder:
    return Holder(version, executor, frozenset(name.encode() for name in ids))


def call(version: tuple[str, int], name: str, *ancestors: str) -> CalledRequest:
    return CalledRequest(name.encode(), version, tuple(ancestor.encode() for ancestor in ancestors))


def found(
    instances: Mapping[tuple[str, int], Mapping[str, int]],
    holders: list[Holder],
    *called: CalledRequest,
    slots: Mapping[tuple[str, int], tuple[SlotGroup, ...]] | None = None,
) -> dict[str, Lack]:
    situation = Situation(instances, tuple(holders), {one.id: one for one in called}, slots or {})
    return {one.call.id.decode(): one.lack for one in stuck_calls(situation)}


def stuck(instances: Mapping[tuple[str, int], int], holders: list[Holder], *called: CalledRequest) -> set[str]:
    lacks = found({version: {"e": count} for version, count in instances.items()}, holders, *called)
    assert set(lacks.values()) <= {Lack.INSTANCE}
    return {*lacks}


def test_a_model_of_one_instance_that_calls_itself_is_stuck() -> None:
    assert stuck({A: 1}, [holder(A, "r")], call(A, "s", "r")) == {"s"}


def test_with_another_instance_it_is_not() -> None:
    assert stuck({A: 2}, [holder(A, "r")], call(A, "s", "r")) == set()
    # nor when that one is busy with something else
    assert stuck({A: 2}, [holder(A, "r"), holder(A, "other")], call(A, "s", "r")) == set()
    # but with all of them held by callers that wait it is
    both = [holder(A, "r"), holder(A, "q")]
    assert stuck({A: 2}, both, call(A, "s", "r"), call(A, "t", "q")) == {"s", "t"}
    # one of whom waits for something that moves
    assert stuck({A: 2, B: 1}, [*both, holder(B, "t")], call(A, "s", "r"), call(B, "t", "q")) == set()


def test_the_way_back_may_be_long() -> None:
    holders = [holder(A, "r"), holder(B, "s"), holder(C, "t")]
    chain = [call(B, "s", "r"), call(C, "t", "r", "s"), call(A, "u", "r", "s", "t")]
    assert stuck({A: 1, B: 1, C: 1}, holders, *chain) == {"u"}
    assert stuck({A: 1, B: 1, C: 1}, holders, *chain[:2]) == set()


def test_two_chains_may_be_in_each_others_way() -> None:
    holders = [holder(A, "r"), holder(B, "q")]
    assert stuck({A: 1, B: 1}, holders, call(B, "s", "r"), call(A, "t", "q")) == {"s", "t"}
    assert stuck({A: 1, B: 1}, holders, call(B, "s", "r")) == set()


def test_a_batch_is_held_by_any_of_its_requests() -> None:
    # s, which runs in b together with q, waits for q's call of a, whose instance waits for s
    holders = [holder(A, "r"), holder(B, "s", "q")]
    assert stuck({A: 1, B: 1}, holders, call(B, "s", "r"), call(A, "t", "q")) == {"t"}


def test_what_waits_at_its_executor_waits_as_well() -> None:
    holders = [holder(A, "r"), holder(A, "s")]
    assert stuck({A: 1}, holders, call(A, "s", "r")) == {"s"}
    # one of two executors has room
    placed = [holder(A, "r", executor="e"), holder(A, "s", executor="f")]
    assert not found({A: {"e": 1, "f": 1}}, placed, call(A, "s", "r"))


def test_other_executors_are_hope_while_any_instance_there_may_end() -> None:
    callers = [holder(A, "r", executor="e"), holder(A, "q", executor="f")]
    waiting = [call(A, "s", "r"), call(A, "t", "q")]
    assert {*found({A: {"e": 1, "f": 1}}, callers, *waiting)} == {"s", "t"}
    assert not found({A: {"e": 1, "f": 2}}, callers, *waiting)
    assert not found({A: {"e": 1, "f": 1, "g": 1}}, callers, *waiting)


def test_a_model_that_nobody_serves_may_be_served_again() -> None:
    assert stuck({}, [holder(B, "r")], call(A, "s", "r")) == set()
    assert stuck({A: 0, B: 1}, [holder(B, "r")], call(A, "s", "r")) == set()


def test_callers_that_hold_nothing_are_in_nobodys_way() -> None:
    assert stuck({A: 1}, [holder(A, "other")], call(A, "s", "gone")) == set()


# -- sequences ---------------------------------------------------------------------------------------------------------


def step(version: tuple[str, int], name: str, *ancestors: str, waits_for: Step) -> CalledRequest:
    return CalledRequest(name.encode(), version, tuple(ancestor.encode() for ancestor in ancestors), waits_for)


def group(size: int, *running: str, batches: tuple[str, ...] = (), index: int = 0) -> SlotGroup:
    return SlotGroup("e", index, size, tuple(i.encode() for i in batches), tuple(i.encode() for i in running))


def test_a_model_that_calls_its_own_sequence_is_stuck() -> None:
    own = step(A, "s", "r", waits_for=Step((b"r",), (b"r",), True))
    assert found({}, [holder(A, "r")], own) == {"s": Lack.STEP}
    # one that has let its instance go, too
    assert found({}, [holder(A, "r")], step(A, "s", "r", waits_for=Step((b"r",), (), True))) == {"s": Lack.STEP}
    # but not when that is another request, which ends
    other = step(A, "s", "r", waits_for=Step((b"q",), (b"q",), True))
    assert found({}, [holder(B, "r"), holder(A, "q")], other) == {}


def test_the_instance_of_a_sequence_may_be_held_by_its_caller() -> None:
    bound = step(A, "s", "r", waits_for=Step((), (b"r",), True))
    assert found({}, [holder(A, "r")], bound) == {"s": Lack.OWN_INSTANCE}
    assert found({}, [holder(A, "r")], step(A, "s", "r", waits_for=Step((), (), True))) == {}


def test_slots_may_be_held_by_callers() -> None:
    holders = [holder(A, "r"), holder(A, "q")]
    waiting = [step(A, "s", "r", waits_for=Step()), step(A, "t", "q", waits_for=Step())]
    full = group(1, "r", batches=("r",)), group(1, "q", batches=("q",), index=1)
    assert found({}, holders, *waiting, slots={A: full}) == {"s": Lack.SLOT, "t": Lack.SLOT}
    # without q's call the second one ends, and with it perhaps its sequence
    assert found({}, holders, waiting[0], slots={A: full}) == {}
    # a sequence of which nothing runs may end, or rest for too long
    resting = full[0], group(1, index=1)
    assert found({}, holders, *waiting, slots={A: resting}) == {}
    # which is of no use where the instance itself is held
    busy = group(2, "r", batches=("r",)), group(2, "q", batches=("q",), index=1)
    assert found({}, holders, *waiting, slots={A: busy}) == {"s": Lack.INSTANCE, "t": Lack.INSTANCE}
    # instances that went on to other batches still have the sequences of those that they freed
    freed = group(1, "r"), group(1, "q", index=1)
    assert found({}, holders, *waiting, slots={A: freed}) == {"s": Lack.SLOT, "t": Lack.SLOT}


def test_a_model_with_sequences_that_nobody_serves_may_be_served_again() -> None:
    assert found({}, [holder(B, "r")], step(A, "s", "r", waits_for=Step())) == {}
    assert found({}, [holder(B, "r")], step(A, "s", "r", waits_for=Step()), slots={A: ()}) == {}
