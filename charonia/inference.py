"""One inference as every front and every model sees it: what was asked and what was answered, and rules for both.

Pure. These are the protocol-neutral forms between `gateway.http` / `gateway.grpc` and `gateway.service`. How they
travel through the log is `charonia.wire`.

The rules (bounds, deadlines, names, error texts) hold on every protocol and for every model. Each protocol's codec
checks the types of parameters (H20, G20); `charonia.calls.admission` checks a request against its model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import DEADLINE_EXCEEDED, CharoniaError, DeadlineExceeded, InvalidArgument
from .generation.prompt_keys import PromptRoute
from .tensors import Tensor
from .traces.contexts import Traced

ParameterValue = str | int | bool | float
Parameters = dict[str, ParameterValue]

RECEIPT = "charonia_receipt"
"""The parameter with which a request asks for its receipt, and that of the answer that holds it (ADR 0055)."""

MAX_CLIENT_ID_BYTES = 65_535
"""A request record has two bytes for the length of an id."""

LOWEST_PRIORITY = 2**31 - 1
"""The priority that means a model's last level, however many it has: of requests that must not delay others (S8)."""

MAX_DIMENSIONS = 64
"""No array library takes more; the bound keeps the product of a hostile shape cheap."""

MAX_DEADLINE_NS = 2**63 - 1
_MAX_DEADLINE_AHEAD_NS = 366 * 86_400 * 1_000_000_000
NO_DEADLINE = "'charonia_deadline_us' must be a whole number of 0 or more"

MAX_REST_BYTES = 1 << 20
"""Names, ids and parameters of a request, over which the event loop iterates: this much takes 5 ms."""

LATEST_VERSION = -1
"""An empty version in a request: the numerically highest READY one (I1)."""
_LONG_BITS, _MAX_LONG_DIGITS = 64, 19
"""Triton reads versions with `stol`."""
_LEADING_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?)([0-9]+)")


@dataclass(frozen=True, slots=True)
class RegionPart:
    """A part of a region of its client's shared memory; `offset` counts from where the region begins (H49)."""

    region: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RegionUse:
    """Which inputs of a request, by their position, and which of its outputs lie in regions."""

    inputs: Mapping[int, RegionPart]
    outputs: Mapping[str, RegionPart]


@dataclass(slots=True)
class InferenceRequest:
    """A request before or after admission. Fronts fill it; `charonia.calls.admission` checks it against the model.

    `outputs` are the requested output names in order, empty for all (H12). `parameters` holds custom parameters only
    (H20); the ones with a meaning of their own have fields here. `priority` 0 means the model's default level (S8);
    `timeout_us` 0 means none (I11). `deadline_ns` is absolute wall time in ns since the epoch, 0 for none.
    """

    model: str
    version: int
    inputs: list[Tensor]
    id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: Parameters = field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0
    deadline_ns: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    trace: Traced | None = None
    """Where what is reported of it is gathered, when it is traced."""
    elements: dict[str, str] | None = None
    """By BYTES input whose elements were counted before admission: what is wrong with them, "" for nothing."""
    served: Any = field(default=None, compare=False, repr=False)
    """The `ServedVersion` that a front read it for, None where it was not looked up."""
    regions: RegionUse | None = None
    """What of it lies in its client's shared memory; such inputs are empty until the gateway has read them."""
    headers: Iterable[tuple[bytes, bytes]] | None = None
    """The headers of its call, names in lower case, where a front lets routing rules choose its version; None: the
    present version is its version."""
    prompt: PromptRoute | None = None
    """For a model that generates text, where a front has tokenised the prompt."""


@dataclass(slots=True)
class InferenceResponse:
    """The answer to one request. `error` set means the request failed and `outputs` is empty.

    `outputs` are in the order requested, or in the model's order when none were named (H12). Of a request with several
    responses each has its `place` (attempt, index from 0), and the last one is `final`. A final one without outputs is
    `bare` if the model sent it as a response; otherwise it is only the flag that there are no more (G24).
    """

    model: str
    version: int
    outputs: list[Tensor]
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
    error: CharoniaError | None = None
    final: bool = True
    place: tuple[int, int] | None = None
    bare: bool = False

    @property
    def is_flag(self) -> bool:
        """Whether it says only that there are no more responses (G24)."""
        return self.final and not (self.bare or self.outputs or self.parameters or self.error is not None)


def leading_number(text: str) -> int | None:
    """The decimal number that a text begins with, after white space; None if there is none, or one beyond 64 bits."""
    found = _LEADING_NUMBER.match(text)
    if found is None:
        return None
    digits = found[2].lstrip("0")
    if len(digits) > _MAX_LONG_DIGITS:
        return None
    number = int(found[1] + (digits or "0"))
    return number if -(1 << _LONG_BITS - 1) <= number < 1 << _LONG_BITS - 1 else None


def parse_version(version: str) -> int:
    """The number of a version string, `LATEST_VERSION` for "". Raises E6's `InvalidArgument`.

    As in Triton, text that follows the number is ignored, and 0 is a version that no model has. "stol" is the
    reason that Triton gives.
    """
    if not version:
        return LATEST_VERSION
    number = leading_number(version)
    if number is None:
        raise InvalidArgument(
            f"failed to get model version from specified version string '{version[:64]}' (details: stol), version "
            "should be an integral value > 0"
        )
    if number < 0:
        raise InvalidArgument(f"invalid model version specified '{version}' , version should be an integral value > 0")
    return number


def wanted_outputs(outputs: list[Tensor], wanted: tuple[str, ...]) -> list[Tensor]:
    """Those of the outputs that were asked for, in the model's order; all where none was named."""
    return [tensor for tensor in outputs if tensor.name in wanted] if wanted else outputs


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
