"""Which sequence the steps of an ensemble are asked for, and what its answers say of it."""

from __future__ import annotations

import logging

import pytest

from batcher.ensembles.step_sequences import NO_SEQUENCE, answer_parameters, made_mark, step_mark
from charonia.errors import InvalidArgument
from charonia.inference import Parameters
from charonia.wire import SequenceMark

OWN = SequenceMark(7, start=True, scope=3)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, OWN),
        ({"other": 1}, OWN),
        ({"sequence_id": 9}, SequenceMark(9, scope=3)),
        ({"sequence_id": -1}, SequenceMark(2**64 - 1, scope=3)),
        ({"sequence_id": "nine", "sequence_end": True}, SequenceMark("nine", end=True, scope=3)),
        ({"sequence_end": True}, SequenceMark(7, end=True, scope=3)),
    ],
)
def test_parameters_of_a_response_win(parameters: Parameters, expected: SequenceMark) -> None:
    assert made_mark(OWN, parameters) == expected


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"sequence_id": True}, "expected parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or"),
        ({"sequence_id": 1.5}, "TRITONSERVER_PARAMETER_INT or TRITONSERVER_PARAMETER_STRING"),
        ({"sequence_start": 1}, "expect parameter 'sequence_start' to be TRITONSERVER_PARAMETER_BOOL"),
        ({"sequence_end": "yes"}, "expect parameter 'sequence_end' to be TRITONSERVER_PARAMETER_BOOL"),
    ],
)
def test_parameters_of_other_types_are_refused(parameters: Parameters, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        made_mark(OWN, parameters)


def test_a_step_belongs_to_the_sequence_of_its_inputs(caplog: pytest.LogCaptureFixture) -> None:
    other = SequenceMark(9)
    assert step_mark(OWN, [None, None], "m") == OWN
    assert step_mark(OWN, [None, other, other], "m") == other
    assert not caplog.records
    with caplog.at_level(logging.ERROR):
        assert step_mark(OWN, [other, OWN], "m") == other
    assert "Different set of response parameters are set for 'm'" in caplog.text


@pytest.mark.parametrize(
    ("request_", "mark", "shown"),
    [
        (NO_SEQUENCE, NO_SEQUENCE, 0),
        (OWN, SequenceMark(2**64 - 1), -1),
        (OWN, SequenceMark("nine"), 0),
        (SequenceMark("mine"), SequenceMark("nine"), "nine"),
        (SequenceMark("mine"), SequenceMark(9), ""),
    ],
)
def test_an_answer_has_ids_of_the_type_of_its_request(
    request_: SequenceMark, mark: SequenceMark, shown: int | str
) -> None:
    expected = {"sequence_id": shown, "sequence_start": False, "sequence_end": False}
    assert answer_parameters(request_, [None, mark]) == expected
    assert answer_parameters(request_, [None]) == answer_parameters(request_, []) == {}
