"""A failure in the place of a response that cannot be sent."""

from __future__ import annotations

import numpy as np
import pytest

from charonia.errors import InternalError
from charonia.tensors import Tensor
from charonia.traces.reports import Report
from charonia.wire import failed_response, pack_failure, pack_response, report_response, time_response, unpack_response

Y = Tensor.of("y", np.arange(4))


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("place", [None, (2, 7)])
def test_it_is_the_failure_of_the_same_request_at_the_same_place(final: bool, place: tuple[int, int] | None) -> None:
    error = InternalError("too large")
    answer = pack_response(b"r" * 16, "m", 3, [Y], {"p": 1}, final=final, place=place)
    expected = pack_failure(b"r" * 16, "m", 3, error, final=final, place=place)
    report = Report(b"spanspan", "m", 3, "q", ())
    for one in (answer, report_response(answer, report), report_response(time_response(answer, (1, 2, 3)), report)):
        assert failed_response(one, error) == expected
    found = unpack_response(expected)
    assert (found.id, found.model, found.version, found.final, found.place) == (b"r" * 16, "m", 3, final, place)
