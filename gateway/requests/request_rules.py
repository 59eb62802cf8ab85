"""Rules for a request on every protocol, independent of its model: bounds, deadlines, names, error texts. Pure.

Each protocol's codec checks the types of parameters (H20, G20); `admission` checks a request against its model.
"""

from __future__ import annotations

from charonia.errors import DEADLINE_EXCEEDED, DeadlineExceeded, InvalidArgument
from charonia.wire import MAX_CLIENT_ID_BYTES, RECEIPT

MAX_DIMENSIONS = 64
"""No array library takes more; the bound keeps the product of a hostile shape cheap."""

MAX_DEADLINE_NS = 2**63 - 1

MAX_REST_BYTES = 1 << 20
"""Names, ids and parameters of a request, over which the event loop iterates: this much takes 5 ms."""

MAX_CONTROL_BYTES = 65_536
"""Of a control call, which the event loop parses whole; a load request with files is no such call."""

_MAX_DEADLINE_AHEAD_NS = 366 * 86_400 * 1_000_000_000

NO_DEADLINE = "'charonia_deadline_us' must be a whole number of 0 or more"


def check_request_id(request_id: str) -> None:
    """Raises `InvalidArgument` for an id (I9) that no record can hold."""
    if len(request_id) <= MAX_CLIENT_ID_BYTES // 4:
        return
    size = len(request_id.encode())
    if size > MAX_CLIENT_ID_BYTES:
        raise InvalidArgument(f"request id of {size} bytes exceeds the maximum of {MAX_CLIENT_ID_BYTES} bytes")


def check_rest(size_bytes: int) -> None:
    """Raises `InvalidArgument` for more than `MAX_REST_BYTES` of a request without its tensors."""
    if size_bytes > MAX_REST_BYTES:
        raise InvalidArgument(
            f"request has {size_bytes} bytes of names and parameters beside its tensors, the limit is {MAX_REST_BYTES}"
        )


def check_parameter_name(key: str) -> None:
    """Raises `InvalidArgument` for a custom parameter whose name is reserved (H20)."""
    if key.startswith("triton_"):
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
        )
    if key.startswith("charonia_") and key != RECEIPT:
        raise InvalidArgument(f"unknown parameter '{key[:64]}': names starting with 'charonia_' are reserved")


def check_dimensions(name: str, dimensions: int) -> None:
    """Raises `InvalidArgument` for a shape with more than `MAX_DIMENSIONS`."""
    if dimensions > MAX_DIMENSIONS:
        raise InvalidArgument(
            f"invalid shape for input '{name}': {dimensions} dimensions, at most {MAX_DIMENSIONS} are supported"
        )


def earlier(one_ns: int, other_ns: int) -> int:
    """The earlier of two deadlines; 0 means none."""
    return min(one_ns, other_ns) if one_ns and other_ns else one_ns or other_ns


def check_deadline(deadline_ns: int, now_ns: int) -> None:
    """Raises `DeadlineExceeded` for a past deadline, `InvalidArgument` for one over a year ahead."""
    if deadline_ns <= now_ns:
        raise DeadlineExceeded(DEADLINE_EXCEEDED)
    if deadline_ns - now_ns > _MAX_DEADLINE_AHEAD_NS:
        raise InvalidArgument("request deadline is more than 366 days ahead")
