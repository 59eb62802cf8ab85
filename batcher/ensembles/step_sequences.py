"""Passes sequence parameters through an ensemble: steps inherit them, answers carry them (S52). Pure.

Every tensor that a step made has a mark: that of its step, or what the parameters of the step's response replaced it
with. A following step gets the mark of its inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from charonia.errors import InvalidArgument
from charonia.inference import Parameters
from charonia.wire import SequenceMark

_log = logging.getLogger(__name__)

NO_SEQUENCE = SequenceMark(0)
_ID, _START, _END = "sequence_id", "sequence_start", "sequence_end"
_INT64, _UINT64 = 1 << 63, 1 << 64


def made_mark(asked: SequenceMark, parameters: Parameters) -> SequenceMark:
    """The mark of the outputs of a step `asked` with another mark. Raises `InvalidArgument` for wrong parameters."""
    if not parameters or parameters.keys().isdisjoint((_ID, _START, _END)):
        return asked
    correlation_id = parameters.get(_ID, asked.correlation_id)
    if isinstance(correlation_id, bool) or not isinstance(correlation_id, int | str):
        raise InvalidArgument(
            f"expected parameter '{_ID}' to be TRITONSERVER_PARAMETER_INT or TRITONSERVER_PARAMETER_STRING"
        )
    for name in (_START, _END):
        if not isinstance(parameters.get(name, False), bool):
            raise InvalidArgument(f"expect parameter '{name}' to be TRITONSERVER_PARAMETER_BOOL")
    if not isinstance(correlation_id, str):
        correlation_id %= _UINT64
    start, end = bool(parameters.get(_START)), bool(parameters.get(_END))
    return SequenceMark(correlation_id, start, end, asked.scope)


def step_mark(request: SequenceMark, marks: Iterable[SequenceMark | None], model: str) -> SequenceMark:
    """The mark for a step; the marks of its inputs are None for tensors of the request."""
    chosen: SequenceMark | None = None
    for mark in marks:
        if chosen is not None and mark is not None and mark != chosen:
            _log.error("Different set of response parameters are set for '%s'. %s is used.", model, chosen)
        chosen = chosen or mark
    return chosen or request


def answer_parameters(request: SequenceMark, marks: Iterable[SequenceMark | None]) -> Parameters:
    """The parameters of an answer: ids have the type of the request's id, a number if it has none."""
    found = [mark for mark in marks if mark is not None]
    if not found:
        return {}
    mark, correlation_id = found[-1], found[-1].correlation_id
    if isinstance(request.correlation_id, str):
        shown: int | str = correlation_id if isinstance(correlation_id, str) else ""
    else:
        shown = 0 if isinstance(correlation_id, str) else (correlation_id + _INT64) % _UINT64 - _INT64
    return {_ID: shown, _START: mark.start, _END: mark.end}
