"""The calls have names of their own, and ask models that are there."""

from __future__ import annotations

from collections import Counter

from loadtest.peers.compared_calls import GrpcCall, HttpCall, calls
from loadtest.peers.compared_models import MODELS


def test_names_tell_the_calls_apart() -> None:
    assert [name for name, count in Counter(call.name for call in calls()).items() if count > 1] == []


def test_every_model_is_asked() -> None:
    asked = set()
    for call in calls():
        if isinstance(call, GrpcCall):
            asked |= {request.model_name for request in call.requests}
        else:
            asked.add(call.path.split("/")[3])
    assert asked == {*MODELS, "nope"}


def test_a_sequence_keeps_its_id_and_its_order() -> None:
    steps = [call for call in calls() if isinstance(call, HttpCall) and "direct whole" in call.name]
    assert [call.name for call in steps] == [f"http direct whole {at}" for at in range(4)]
    assert len({call.body.partition(b'"sequence_id": ')[2][:3] for call in steps}) == 1
