"""Checks a request against the model it names before anything enters the log (I1-I4, T3, T6-T8). Pure.

An admitted request is safe to put into a batch: every tensor's bytes match its shape, every shape matches the model's.
Requests of a known signature pass with one dictionary look-up (and a scan of BYTES length prefixes). A request of a
sequence gets its mark here (S30, S31, S42); the scheduler knows whether the sequence has begun (S32).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from charonia.catalog.served import ServedVersion
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument, Unsupported
from charonia.inference import InferenceRequest
from charonia.models.caching import CachingRules
from charonia.models.ensemble import ENSEMBLE_SCHEDULING
from charonia.models.interface import ModelInterface, TensorSpec
from charonia.models.sequence_batcher import SequenceBatching
from charonia.tensors import MAX_ELEMENTS, Tensor, check_bytes_elements, element_count, expected_size_bytes, shape_text
from charonia.wire import (
    MAX_CACHED_META_BYTES,
    MAX_CORRELATION_ID_BYTES,
    RequestMeta,
    SequenceMark,
    batch_signature,
    request_meta,
)

UNKNOWN_ID = "<id_unknown>"

_SIGNATURES_REMEMBERED = 4096

_CALL_NOTHING = frozenset({"fil", "onnxruntime", "openvino", "tensorflow", "tensorrt", "pytorch"})
"""Backends that run graphs, which call no models."""

_BATCH_HINT = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def request_prefix(request_id: str) -> str:
    """E10: the prefix of request-scoped messages."""
    return f"[request id: {request_id or UNKNOWN_ID}] "


@dataclass(frozen=True, slots=True)
class Admitted:
    """What a request was admitted with: its cached meta, its rows and its batch signature."""

    meta: RequestMeta
    rows: int
    signature: int
    bytes_inputs: tuple[tuple[int, int], ...]
    """(position, expected elements) of the BYTES inputs, whose length prefixes differ from request to request, in the
    order of their checks."""
    sequential: bool = False
    """The model has sequence batching."""
    passes_on: bool = False
    """The model may make requests of its own for this one: then its record has its caller context."""
    keeps_priority: bool = False
    """The model is an ensemble, which has no levels: the record keeps the client's priority for its steps (S52)."""


class Admission:
    """Checks requests against one loaded version."""

    def __init__(self, interface: ModelInterface, version: int, content_hash: str) -> None:
        self._interface = interface
        self._version = version
        self._content_hash = content_hash
        self._known: dict[Any, Admitted] = {}
        self.caching: CachingRules | None = None
        """Set when this gateway caches the responses."""

    def admit(self, request: InferenceRequest) -> Admitted:
        """Raises `InvalidArgument` with the interface's text, and `Unsupported` for a correlation id that is too long.

        The first failure in Triton's order wins (I2).

        Names of outputs come first, then what all inputs have in common, then one input after another: the last one
        first, as Triton keeps inputs in a hash map, of which each new one becomes the first.
        """
        if request.sequence_id:
            check_length(request)
        inputs = request.inputs
        parameters = request.parameters
        key = (
            tuple([(t.name, t.datatype, t.shape, len(t.data)) for t in inputs]),
            request.outputs,
            tuple(parameters.items()) if parameters else None,
        )
        admitted = self._known.get(key)
        if admitted is None:
            admitted = self._check(request)
            # 1, 1.0 and True are one dictionary key but not one parameter: such requests are checked each time
            if len(admitted.meta.packed) <= MAX_CACHED_META_BYTES and (
                not parameters or all(isinstance(value, str) for value in parameters.values())
            ):
                if len(self._known) >= _SIGNATURES_REMEMBERED:
                    self._known.clear()
                self._known[key] = admitted
        else:
            try:
                for position, expected in admitted.bytes_inputs:
                    self._check_strings(request, inputs[position], expected)
            except InvalidArgument as error:
                raise InvalidArgument(request_prefix(request.id) + error.message) from None
        if admitted.sequential:
            assert self._interface.sequence_batching is not None
            check_sequence(request, admitted.rows, self._interface.name, self._interface.sequence_batching)
        return admitted

    def level(self, priority: int) -> int:
        """The queue level of a request's `priority` parameter (S8); 0 for models without levels, and so for all
        without dynamic batching, as those of sequences are.
        """
        batching = self._interface.dynamic_batching
        return 0 if batching is None or not batching.priority_levels else batching.level(priority)

    def _check(self, request: InferenceRequest) -> Admitted:
        interface = self._interface
        self._check_names(request)
        try:
            rows = self._check_rows(request.inputs)
            for tensor in reversed(request.inputs):
                self._check_tensor(request, tensor)
        except InvalidArgument as error:
            raise InvalidArgument(request_prefix(request.id) + error.message) from None
        meta = request_meta(self._version, self._content_hash, request.inputs, request.outputs, request.parameters)
        batching = interface.max_batch_size > 0
        signature = batch_signature(
            self._version,
            [
                (t.name, () if interface.inputs[t.name].allow_ragged_batch else t.shape[1:] if batching else t.shape)
                for t in request.inputs
            ],
        )
        bytes_inputs = tuple(
            (position, element_count(t.name, t.shape))
            for position, t in reversed(list(enumerate(request.inputs)))
            if t.datatype is DataType.BYTES
        )
        sequential = interface.sequence_batching is not None
        is_ensemble = interface.scheduling == ENSEMBLE_SCHEDULING
        return Admitted(meta, rows, signature, bytes_inputs, sequential, _passes_on(interface), is_ensemble)

    def _check_names(self, request: InferenceRequest) -> None:
        interface = self._interface
        model = interface.name
        seen: set[str] = set()
        for tensor in request.inputs:
            if tensor.name in seen:
                raise InvalidArgument(f"{request_prefix(request.id)}input '{tensor.name}' already exists in request")
            seen.add(tensor.name)
        self._check_outputs(request)
        missing = interface.required_inputs - seen
        required, total = len(interface.required_inputs), len(interface.inputs)
        if required <= len(seen) <= total:
            for tensor in reversed(request.inputs):
                if tensor.name not in interface.inputs:
                    raise InvalidArgument(f"unexpected inference input '{tensor.name}' for model '{model}'")
            if not missing:
                return
        expected = (
            f"expected {total} inputs"
            if required == total
            else f"expected number of inputs between {required} and {total}"
        )
        raise InvalidArgument(
            f"{request_prefix(request.id)}{expected} but got {len(seen)} inputs for model '{model}'. Got input(s) "
            f"[{_names(seen)}], but missing required input(s) [{_names(missing)}]. Please provide all required "
            "input(s)."
        )

    def _check_rows(self, inputs: list[Tensor]) -> int:
        """The batch size of a request."""
        model, most = self._interface.name, self._interface.max_batch_size
        rows = 0
        for tensor in reversed(inputs):
            if not most:
                continue
            if not tensor.shape:
                raise InvalidArgument(
                    f"input '{tensor.name}' has no shape but model requires batch dimension for '{model}'"
                )
            if rows and tensor.shape[0] != rows:
                raise InvalidArgument(f"input '{tensor.name}' batch size does not match other inputs for '{model}'")
            rows = tensor.shape[0]
            if not rows:
                raise InvalidArgument(f"inference request batch-size must be >= 1 for '{model}'")
        if not 0 <= rows <= most:  # Triton reads negative numbers as large ones
            raise InvalidArgument(f"inference request batch-size must be <= {most} for '{model}'")
        return rows or 1

    def _check_tensor(self, request: InferenceRequest, tensor: Tensor) -> None:
        interface = self._interface
        model, spec = interface.name, interface.inputs[tensor.name]
        if tensor.datatype is not spec.datatype:
            raise InvalidArgument(
                f"inference input '{tensor.name}' data-type is '{tensor.datatype.value}', but model '{model}' "
                f"expects '{spec.datatype.value}'"
            )
        self._check_dims(tensor, spec, tensor.shape[1:] if interface.max_batch_size > 0 else tensor.shape)
        if tensor.datatype is DataType.BYTES:
            self._check_strings(request, tensor, _size(tensor))
            return
        expected = _size(tensor)
        if len(tensor.data) != expected:
            raise InvalidArgument(
                f"input byte size mismatch for input '{tensor.name}' for model '{model}'. Expected {expected}, "
                f"got {len(tensor.data)}"
            )

    def _check_strings(self, request: InferenceRequest, tensor: Tensor, expected: int) -> None:
        if request.elements is None or tensor.name not in request.elements:
            check_bytes_elements(tensor.data, expected, name=tensor.name, model=self._interface.name)
        elif complaint := request.elements[tensor.name]:
            raise InvalidArgument(complaint)

    def _check_dims(self, tensor: Tensor, spec: TensorSpec, dims: tuple[int, ...]) -> None:
        matches = len(dims) == len(spec.dims) and all(
            want in (-1, got) for want, got in zip(spec.dims, dims, strict=True)
        )
        if -1 in dims and len(dims) == len(spec.dims):
            wrong = next(at for at, dim in enumerate(dims) if dim == -1 or spec.dims[at] not in (-1, dim))
            if dims[wrong] == -1:
                raise InvalidArgument(
                    f"All input dimensions should be specified for input '{tensor.name}' for model "
                    f"'{self._interface.name}', got {shape_text(tensor.shape)}"
                )
        if matches:
            return
        batching = self._interface.max_batch_size > 0
        expected = (-1, *spec.dims) if batching else spec.dims
        hint = _BATCH_HINT if batching else ""
        raise InvalidArgument(
            f"unexpected shape for input '{tensor.name}' for model '{self._interface.name}'. Expected "
            f"{shape_text(expected)}, got {shape_text(tensor.shape)}. {hint}"
        )

    def _check_outputs(self, request: InferenceRequest) -> None:
        if len(set(request.outputs)) < len(request.outputs):
            twice = next(name for at, name in enumerate(request.outputs) if name in request.outputs[:at])
            raise InvalidArgument(f"{request_prefix(request.id)}output '{twice}' already exists in request")
        for name in sorted(request.outputs):
            if name not in self._interface.outputs:
                raise InvalidArgument(f"unexpected inference output '{name}' for model '{self._interface.name}'")


class Admissions:
    """The `Admission` of each version that one process calls, a new one once that is loaded with other content."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[str, Admission]] = {}

    def of(self, served: ServedVersion) -> Admission:
        key = (served.model, served.version)
        known = self._known.get(key)
        if known is None or known[0] != served.content_hash:
            admission = Admission(served.interface, served.version, served.content_hash)
            known = self._known[key] = (served.content_hash, admission)
        return known[1]


def _passes_on(interface: ModelInterface) -> bool:
    """Whether the model may call others. All may but those of backends in `_CALL_NOTHING`: ensembles do, and a backend
    of any other name may run a user's code.
    """
    return interface.backend not in _CALL_NOTHING


def _size(tensor: Tensor) -> int:
    """How many bytes its shape asks for, or elements of BYTES. Raises `InvalidArgument` with the core's texts (T6)."""
    name, shape = tensor.name, tensor.shape
    is_bytes = tensor.datatype is DataType.BYTES
    try:
        return element_count(name, shape) if is_bytes else expected_size_bytes(name, tensor.datatype, shape)
    except InvalidArgument:
        if any(dim < 0 for dim in shape):
            raise InvalidArgument(f"tensor '{name}' contains an invalid dimension {shape_text(shape)}") from None
        what = "element count" if is_bytes else "byte size"
        raise InvalidArgument(f"{what} for tensor '{name}' exceeds maximum size of {MAX_ELEMENTS}") from None


def _names(names: set[str] | frozenset[str]) -> str:
    return ",".join(f"'{name}'" for name in sorted(names))


_UINT64 = (1 << 64) - 1


def check_length(request: InferenceRequest) -> None:
    """S42, for every model. Raises `Unsupported`."""
    correlation_id = request.sequence_id
    if isinstance(correlation_id, str) and len(correlation_id.encode()) > MAX_CORRELATION_ID_BYTES:
        raise Unsupported(f"string correlation ID cannot be longer than {MAX_CORRELATION_ID_BYTES} characters")


def check_sequence(request: InferenceRequest, rows: int, model: str, block: SequenceBatching) -> None:
    """S30, S31, S42. Raises `InvalidArgument`, without a prefix like all errors of sequences."""
    if rows != 1:
        raise InvalidArgument(
            f"inference request to model '{model}' must specify batch-size 1 due to requirements of sequence batcher"
        )
    if not request.sequence_id:
        if block.iterative:
            return
        raise InvalidArgument(
            f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID"
        )
    control = block.correlation_control
    if control is None:
        return
    given = DataType.BYTES if isinstance(request.sequence_id, str) else DataType.UINT64
    if (given is DataType.BYTES) is not (control.datatype is DataType.BYTES):
        raise InvalidArgument(
            f"sequence batching control '{control.name}' data-type is '{given.value}', but model '{model}' expects "
            f"'{control.datatype.value}'"
        )


def sequence_mark(request: InferenceRequest, request_id: bytes, tenant: str) -> SequenceMark:
    """The mark of an admitted request. One without an id is a sequence of its own (S30, S41)."""
    scope = int.from_bytes(hashlib.blake2b(tenant.encode(), digest_size=8).digest(), "little") or 1 if tenant else 0
    correlation_id = request.sequence_id
    if not correlation_id:
        return SequenceMark(int.from_bytes(request_id[:8], "little") | 1, start=True, end=True, scope=scope)
    if not isinstance(correlation_id, str):
        correlation_id &= _UINT64
    return SequenceMark(correlation_id, request.sequence_start, request.sequence_end, scope)
