"""What a client sends and what it gets back, the same for every protocol. Pure.

Requests are checked here as far as a client can know; how they are written is `http_form`'s and `grpc_form`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from charonia.datatypes import DataType
from charonia.errors import DeadlineExceeded, InternalError, InvalidArgument, Unavailable, Unsupported
from charonia.tensors import Buffer, Tensor, check_bytes_elements, element_count, expected_size_bytes, shape_text

ParameterValue = str | int | bool | float
Array = npt.NDArray[Any]

_MAX_DIMENSIONS = 64
"""Of an array of NumPy."""
_WIDEST: Mapping[str, npt.DTypeLike] = {"b": np.bool_, "i": np.int64, "u": np.uint64}

TERMINAL_STATES = frozenset(("succeeded", "failed", "cancelled", "expired"))
"""States of a job that it does not leave; also the last event of each (docs/jobs.md)."""


EMPTY_FINAL = "triton_enable_empty_final_response"
"""A parameter of a request, a boolean: the flag that a stream is over is wanted where it comes without a response."""
FINAL = "triton_final_response"
"""A parameter of each response of a stream: whether it is the last one."""

OVER = "over"
"""Kind of the event that says that there are no more; no caller sees it."""


class NotConnected(Unavailable):
    """No connection to the server could be made: nothing was sent."""


class Refused(Unavailable):
    """The server refused the request before it accepted it, and says when to come again."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConnectionLost(Unavailable):
    """The connection broke after the request was sent: whether it was executed is unknown."""


class OnlyCharonia(Unsupported):
    """Jobs, idempotency keys and resumable streams were asked of a server that is not Charonia."""


class JobNotEnded(DeadlineExceeded):
    """The job had not ended when the caller stopped waiting; it goes on. `status` is the last that was seen."""

    def __init__(self, message: str, status: JobStatus) -> None:
        super().__init__(message)
        self.status = status


class Incomprehensible(InternalError):
    """The answer is none of the KServe v2 protocol."""


@dataclass(frozen=True, slots=True)
class SharedArray:
    """A part of a shared memory region (`shared_region`), as an input or for an output.

    What is written to `array` is what the server reads, and the other way round.
    """

    region: str
    offset: int
    array: Array

    @property
    def size_bytes(self) -> int:
        return self.array.nbytes


Inputs = Mapping[str, npt.ArrayLike | SharedArray]


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of an `https://` or `grpcs://` connection: authorities to trust, and the client's own certificate."""

    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""


class InferenceOptions(TypedDict, total=False):
    """What an inference may say besides its model and inputs.

    `outputs` names the outputs wanted, or maps each to how many of its best classes are wanted (0 for the tensor), or
    to the shared memory that it is to be written to.
    `timeout_s` bounds the whole call, retries included; of a job it is the deadline. `parameters` holds parameters of
    the request, among them Triton's `timeout`, `sequence_id`, `sequence_start` and `sequence_end`; and of a stream
    `triton_enable_empty_final_response`, with which its end is a result, too.
    """

    outputs: Sequence[str] | Mapping[str, int | SharedArray]
    version: str | int
    request_id: str
    priority: int
    timeout_s: float | None
    parameters: Mapping[str, ParameterValue]
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class Inference:
    """One request. `outputs` maps names to classes wanted, empty for every output; `key` is its idempotency key.

    Inputs in `places` and outputs in `targets` lie in shared memory.
    """

    model: str
    version: str
    inputs: tuple[Tensor, ...]
    outputs: Mapping[str, int]
    request_id: str = ""
    priority: int = 0
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    key: str = ""
    places: Mapping[str, SharedArray] = field(default_factory=dict)
    targets: Mapping[str, SharedArray] = field(default_factory=dict)

    @staticmethod
    def of(model: str, inputs: Inputs, options: InferenceOptions) -> Inference:
        """The request of a caller's words. Raises `InvalidArgument` for what no server could take, and `TypeError` for
        an option that there is not."""
        for name in options.keys() - InferenceOptions.__annotations__.keys():
            raise TypeError(f"an inference has no option '{name}'")
        if not model:
            raise InvalidArgument("an inference needs the name of a model")
        outputs = options.get("outputs", ())
        parameters = dict(options.get("parameters", {}))
        for name, value in parameters.items():
            if not isinstance(value, (str, bool, int, float)):
                raise InvalidArgument(
                    f"parameter '{name}' must be a string, a number or a boolean, not {type(value).__name__}"
                )
        if not isinstance(parameters.get(EMPTY_FINAL, False), bool):
            raise InvalidArgument(f"parameter '{EMPTY_FINAL}' must be a boolean")
        if isinstance(outputs, str):
            raise InvalidArgument(f"outputs must be a list of names, not the string '{outputs}'")
        key = options.get("idempotency_key", "")
        if not key.isprintable() or not key.isascii():
            raise InvalidArgument("an idempotency key is printable ASCII")
        wanted = dict(outputs) if isinstance(outputs, Mapping) else dict.fromkeys(outputs, 0)
        return Inference(
            model,
            str(options.get("version", "")),
            tuple(_tensor(name, value) for name, value in inputs.items()),
            {name: what if isinstance(what, int) else 0 for name, what in wanted.items()},
            options.get("request_id", ""),
            options.get("priority", 0),
            parameters,
            key,
            {name: value for name, value in inputs.items() if isinstance(value, SharedArray)},
            {name: what for name, what in wanted.items() if isinstance(what, SharedArray)},
        )


def _tensor(name: str, value: npt.ArrayLike | SharedArray) -> Tensor:
    try:
        if isinstance(value, SharedArray):
            return Tensor.of(name, value.array)
        array = value if isinstance(value, np.ndarray) else _array(value)
        if array.dtype == np.object_ and not all(isinstance(item, (str, bytes, bytearray)) for item in array.flat):
            raise InvalidArgument("its elements are neither numbers of one shape nor strings")
        return Tensor.of(name, array)
    except ValueError as error:
        raise InvalidArgument(f"input '{name}' is no array: {error}") from None
    except InvalidArgument as error:
        raise InvalidArgument(f"input '{name}': {error}") from None


def _array(value: npt.ArrayLike) -> Array:
    """Strings as objects: NumPy's own would lose zeros at their ends, and take no mix of text and bytes."""
    try:
        array = np.asarray(value)
    except UnicodeError:
        return np.array(value, dtype=np.object_)
    return np.array(value, dtype=np.object_) if array.dtype.kind in "SU" else array


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to an inference, or one response of a stream. Arrays are read-only views of what was received.

    BYTES outputs are arrays of `bytes` objects. `place` is (attempt, index) for a response of a job, else None. Of a
    stream the parameter `triton_final_response` says whether it is the last one, which may be without tensors.
    """

    model: str
    version: str
    id: str
    tensors: Mapping[str, Tensor]
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    place: tuple[int, int] | None = None

    def __getitem__(self, name: str) -> Array:
        return self.tensors[name].array()

    @property
    def outputs(self) -> dict[str, Array]:
        """Every output by its name."""
        return {name: tensor.array() for name, tensor in self.tensors.items()}


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job as the server describes it; `fields` is the whole description (docs/jobs.md)."""

    id: str
    state: str
    fields: Mapping[str, Any]

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL_STATES

    @property
    def position(self) -> int:
        """One more than the jobs that are served before it; 0 once it runs."""
        return int(self.fields.get("position", 0))

    @property
    def eta_s(self) -> float | None:
        return self.fields.get("eta_s")

    @property
    def error(self) -> str:
        """The failure's message, empty without one."""
        return str(self.fields.get("error", ""))


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened to a job. `place` is where a reader goes on that has seen it.

    Of kind `response`, one response of the model: `response`, which may be without tensors, or the `error` it failed
    with; neither for the flag that ends a stream. `final` says that no further response comes.
    """

    place: str
    kind: str
    number: int = 0
    time_us: int = 0
    detail: Mapping[str, Any] = field(default_factory=dict)
    response: Result | None = None
    error: str = ""
    final: bool = False

    @property
    def ends(self) -> bool:
        return self.kind in TERMINAL_STATES


def region_parameters(place: SharedArray) -> dict[str, str | int]:
    """The parameters that say where a tensor lies (H11, G4)."""
    offset = {"shared_memory_offset": place.offset} if place.offset else {}
    return {"shared_memory_region": place.region, "shared_memory_byte_size": place.size_bytes, **offset}


def shared_tensor(name: str, datatype: DataType, shape: tuple[int, ...], target: SharedArray) -> Tensor:
    """The output that was written to `target`, where it is no larger than that; its answer has no bytes."""
    whole = target.array.reshape(-1).view(np.uint8).data.toreadonly()
    try:
        size = expected_size_bytes(name, datatype, shape)
    except InvalidArgument as error:
        raise Incomprehensible(str(error)) from None
    return Tensor(name, datatype, shape, whole[:size])


def packed(name: str, datatype: DataType, elements: list[Any]) -> Buffer:
    """The raw bytes of elements that came as a list, flat or nested. Raises `ValueError` and the like for others."""
    if datatype is DataType.BYTES:
        array = np.array(elements, dtype=np.object_)
        if not all(isinstance(element, (str, bytes)) for element in array.flat):
            raise TypeError("its elements are no strings")
        return Tensor.of(name, array).data
    widest = _WIDEST.get(datatype.numpy.kind, np.float64)  # without it NumPy makes floats of large integers
    return np.array(elements, dtype=widest).astype(datatype.numpy).tobytes()


def checked(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """Received tensors by name. Raises `Incomprehensible` for one whose bytes are not its shape's."""
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        name, what = tensor.name, f"{tensor.datatype.value} {shape_text(tensor.shape)}"
        try:
            if tensor.datatype is DataType.BYTES:
                check_bytes_elements(tensor.data, element_count(name, tensor.shape), name=name, model="")
                fits = len(tensor.shape) <= _MAX_DIMENSIONS
            else:
                fits = expected_size_bytes(name, tensor.datatype, tensor.shape) == len(tensor.data)
                fits = fits and len(tensor.shape) <= _MAX_DIMENSIONS
        except InvalidArgument:
            fits = False
        if not fits:
            raise Incomprehensible(f"output '{name}' is said to be {what}, which its {len(tensor.data)} bytes are not")
        found[name] = tensor
    return found
