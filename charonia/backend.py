"""What a backend is: the contract between an executor and the libraries that run models. A public extension point.

Pure. A backend registers a factory in the entry-point group `charonia.backends` under the word that `backend:` has in
`config.pbtxt`. The executor calls `Backend.load` for a version, `Model.signature` (when auto-complete is on), then
`Model.create_instance` once per instance of the instance groups, then `execute` with one batch at a time per instance.
It closes the instances, then the model.

Three shapes of instance: a `BatchInstance` gets assembled arrays (the executor concatenates requests along the batch
dimension and cuts results apart), called in a thread of its own, so it must release the interpreter lock while it
works; a `RequestInstance` gets the single requests and is a coroutine, for backends that run models in processes of
their own; a `StreamingInstance` is one that answers each request any number of times (decoupled models, C19).
A `RequestInstance` may take many requests of one form as columns besides: a `ColumnInstance`. A `BatchInstance` may
have several batches under way: a `SubmittingInstance`.
`charonia.testing.backend_contract` is the suite every backend must pass; it needs no test framework.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy.typing as npt

from .datatypes import DataType
from .errors import CharoniaError, InternalError, InvalidArgument, Unsupported
from .inference import InferenceRequest, Parameters
from .tensors import Buffer, Tensor
from .traces.contexts import Traced

if TYPE_CHECKING:
    from protos.model_config_pb2 import ModelConfig

    from .models.interface import ModelInterface

Array = npt.NDArray[Any]

ENTRY_POINT_GROUP = "charonia.backends"
FORMATS_ENTRY_POINT_GROUP = "charonia.formats"
"""Where a backend registers its formats under its word, if a model may be found by its file or platform alone."""

Feature = Literal[
    "cc_model_filenames",
    "execution_accelerators",
    "non_linear_formats",
    "op_libraries",
    "profiles",
    "secondary_devices",
    "shape_tensors",
]
"""A part of a configuration that most backends have no use for: refused unless the model's backend supports it."""

Isolation = Literal["none", "process", "sandbox"]

Wants = Literal["host", "pinned", "device"]
"""Where the arrays of a batch are to lie: see `PlacedModel`."""

_MAX_DIGITS = 19
_WORDS_OF_ON = frozenset(("1", "true", "on", "yes"))
_WORDS_OF_OFF = frozenset(("0", "false", "off", "no"))

API = (1, 0)
"""The version of this contract. A backend whose `api` has another first number, or a larger second one, is refused."""


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of model that a backend reads.

    `platform` is its word in `platform:`, "" without one. `files` are the names in a version directory that identify
    it; the first is the default of `default_model_filename` (C12, R5). `cpu_instances` is how many instances a group on
    CPUs has whose count is not written (C8).
    """

    platform: str = ""
    files: tuple[str, ...] = ()
    cpu_instances: int = 1


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """One input or output as a model file declares it; a dynamic dimension is -1, the batch dimension included."""

    name: str
    datatype: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GraphSignature:
    """What a model file says; `executors.configuration.autofill` completes the configuration from it (C70,
    C71).
    """

    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a version's files are and what its configuration says. `directory` is the model's, not the version's."""

    name: str
    version: int
    directory: Path
    config: ModelConfig
    backend_config: Mapping[str, str] = field(default_factory=dict)
    native_code: bool = False
    """Whether its operator lets the models of its repository bring machine code (`--allow-native-models`)."""
    isolation: Isolation = "none"
    """Where the model is loaded; "none" also before that is decided."""

    @property
    def version_directory(self) -> Path:
        return self.directory / str(self.version)

    def check_native_code(self, what: str) -> None:
        """Call it before machine code that a model brings is loaded. `what` names it: "'CPU_EXTENSION_PATH' x.so".

        Raises `Unsupported` where the operator has not allowed it for the model's repository.
        """
        if not self.native_code:
            raise Unsupported(
                f"model '{self.name}' brings machine code: {what}. It is loaded only from repositories that are named "
                "with --allow-native-models"
            )

    def check_code(self, what: str) -> None:
        """Call it before code that a model brings is run by the interpreter, from pickles too. `what` names it.

        Raises `Unsupported` outside a sandbox, unless the operator has allowed machine code for the model's repository.
        """
        if self.isolation != "sandbox" and not self.native_code:
            raise Unsupported(
                f"model '{self.name}' brings code: {what}. It runs in a sandbox ('charonia.isolation'), or in "
                "repositories that are named with --allow-native-models"
            )

    def parameter(self, key: str) -> str | None:
        """A model's parameter, else the server's `--backend-config`; None without either, or for an empty one."""
        if key in self.config.parameters:
            said = self.config.parameters[key].string_value
        else:
            said = self.backend_config.get(key, "")
        return said.strip() or None

    def integer(self, key: str) -> int | None:
        """A parameter that is a whole number. Raises `InvalidArgument` for one that is none, or below 0."""
        said = self.parameter(key)
        return None if said is None else self.read_integer(key, said)

    def flag(self, key: str) -> bool | None:
        """A parameter that is on or off. Raises `InvalidArgument` for another word."""
        said = self.parameter(key)
        return None if said is None else self.read_flag(key, said)

    def read_integer(self, key: str, said: str, least: int = 0) -> int:
        """The same of a text from elsewhere, as a parameter of an accelerator. Raises `InvalidArgument` below `least`,
        which is 0, or the negative number that means something.
        """
        digits = said[1:] if said.startswith("-") else said
        if not (digits.isascii() and digits.isdecimal() and len(digits) < _MAX_DIGITS and int(said) >= least):
            raise InvalidArgument(
                f"parameter '{key}' of '{self.name}' must be an integer of at least {least}, got '{said}'"
            )
        return int(said)

    def read_flag(self, key: str, said: str) -> bool:
        """The same of a text from elsewhere."""
        if said.lower() in _WORDS_OF_ON:
            return True
        if said.lower() in _WORDS_OF_OFF:
            return False
        raise InvalidArgument(f"parameter '{key}' of '{self.name}' must be 0 or 1, got '{said}'")


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One instance to create. `kind` is CPU, GPU or MODEL; `device_id` is -1 on CPU; `name` is `<group>_<index>`.

    `cores`, when not empty, are the CPU cores it may run on (C11): a backend that starts threads or processes for it
    starts them there. The thread that executes is restricted by the executor.
    """

    name: str
    kind: str
    device_id: int
    source: ModelSource
    interface: ModelInterface
    cores: frozenset[int] = frozenset()
    calls: ModelCalls | None = None
    """For models that call models; None where no model can be called."""


@dataclass(slots=True)
class ModelRequest:
    """One request as a `RequestInstance` gets it. `outputs` are the requested names, empty for all.

    `origin` is the executor's own; an instance hands it back with the calls its model makes for this request.
    """

    id: str
    correlation_id: int | str
    inputs: list[Tensor]
    outputs: tuple[str, ...]
    parameters: Parameters
    timeout_us: int = 0
    flags: int = 0
    origin: object = None
    trace: Traced | None = None
    """Its trace, when it is traced: calls that its model makes with it are part of that (N5, P17)."""
    window: int = 0
    """How many responses it may be given for now, 0 for any number; a `WindowedInstance` is notified of more."""
    settled: bool = False
    """Its outcome is known already: no caller reads its responses."""
    priority: int = 0
    """Its level; a smaller number goes first. For instances that have requests of several levels at a time."""
    progress: Sequence[bytes] = ()
    """Of a resumable model: the `ModelResponse.progress` of each response that the log accepted from earlier attempts,
    from the first on. The instance gives the same responses for these again, at once and without running the model,
    then goes on after them."""


@dataclass(slots=True)
class ModelResponse:
    """One response of a `RequestInstance`; with `error` set the outputs are ignored (P10)."""

    outputs: list[Tensor] = field(default_factory=list)
    parameters: Parameters = field(default_factory=dict)
    error: CharoniaError | None = None
    again: bool = False
    """There is no answer yet: the model wants another turn with this request (S41). For sequence batchers."""
    progress: bytes = b""
    """What a `StreamingInstance` of a resumable model (`charonia.resumable`) needs later to give this response again
    without running the model, as token ids: it is in the log before the response is seen. Ignored of other models, and
    of a final response."""
    tokens: int = 0
    """How many tokens were generated for it, and for the first response of a request also those of its prompt. Tenants'
    shares of a model that generates text are counted in them."""


class OpenCall(Protocol):
    """A call of another model. Read it to its end, or cancel it."""

    async def next(self) -> ModelResponse | None:
        """The next response, an error of the model among them; None after the last.

        Raises a `CharoniaError` when there will be none.
        """

    def cancel(self) -> None:
        """Give it up; `next` raises `Cancelled` from now on. A second call does nothing."""

    def ask_to_end(self) -> None:
        """Let the called model know that the call is cancelled; `next` goes on until that ends it."""


class ModelCalls(Protocol):
    """How a model's code calls other models and has them loaded (P13, P14). Everything raises `CharoniaError`s."""

    async def find(self, model: str, version: int) -> ModelInterface:
        """The interface of what a call would use, version -1 for the latest. Raises `NotFound` or `Unavailable`."""

    async def open(
        self, request: InferenceRequest, model: str, origins: Sequence[object], *, blocks: bool = False
    ) -> OpenCall:
        """Send a request that a batch of `model` makes, whose requests have these origins, on its way.

        It inherits their deadline, priority and tenant. `blocks`: the instance does nothing else until it is answered,
        and has answered none of those requests yet. Raises what refuses the request.
        """

    async def load(self, model: str, config_json: str, files: dict[str, bytes]) -> None: ...

    async def unload(self, model: str, *, unload_dependents: bool) -> None: ...

    async def is_ready(self, model: str, version: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Timings:
    """What an execution spent on moving inputs to a device, on inference, and on moving outputs back, in ns.

    Statistics add them to what the executor spends on joining and packing. Without them all of it counts as inference.
    Each is a whole number of 0 or more; a batch with others fails.
    """

    input_ns: int
    infer_ns: int
    output_ns: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `BatchInstance.execute` may return in place of the arrays alone.

    `failures` are rows that failed, each with its error: requests with such rows fail, the others are answered. The
    arrays have those rows, too, with any values. In batches of sequences, and with outputs that are scattered, a row
    that fails fails the batch.
    """

    arrays: Mapping[str, Array]
    timings: Timings | None = None
    failures: Mapping[int, CharoniaError] = field(default_factory=dict)


_MAX_TIME_NS = 1 << 53
"""104 days: longer than any execution, and far from the 64 bits that sums of times have."""


def timings_of(outcome: Outcome) -> Timings | None:
    """Return the times of an outcome. Raises `InternalError`, which fails its batch, where they cannot be counted."""
    timings = outcome.timings
    if timings is None:
        return None
    found = []
    for name in ("input_ns", "infer_ns", "output_ns"):
        value: Any = getattr(timings, name, None)
        if not hasattr(value, "__index__") or not 0 <= value <= _MAX_TIME_NS:
            raise InternalError(
                f"the model gave {value!r} as '{name}' of its timings: times are whole numbers of nanoseconds, from 0 "
                f"to {_MAX_TIME_NS}"
            )
        found.append(int(value))
    return Timings(*found)


@runtime_checkable
class BatchInstance(Protocol):
    """An instance over assembled arrays.

    One that remembers nothing from one execution to the next may say so with an attribute `stateless = True`: then
    sequences without implicit states lose nothing when they move to another instance.

    One with a method `started` has it called once in the thread that executes, before the first execution, warm-up
    included; it is never run in another thread then. What it raises fails the load.

    Two more attributes are read for each batch. `batch_sizes`: the numbers of rows it can run, of a model with
    batching; the executor adds rows, cuts them off and runs larger batches in parts. `rows_fail_alone = True`: when a
    batch fails, its requests run again one by one, so that only the bad ones fail. An `Outcome` says it in one run.
    """

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array] | Outcome:
        """Run one batch: arrays of [rows, ...] (or the exact shape without batching) to arrays, one per name.

        Called in the instance's own thread. Raise a `CharoniaError` to fail the batch with that code; any other
        exception fails it as INTERNAL, and the instance must go on working. BYTES are object arrays of bytes. Inputs
        may be read-only and must not be changed; an output may be an input. A name in `outputs` that the model does
        not have is an error.
        """

    def close(self) -> None:
        """Give up what the instance holds; a second call does nothing."""


@runtime_checkable
class InterruptibleInstance(BatchInstance, Protocol):
    """A `BatchInstance` whose execution can be interrupted. Quick ones may then run in the executor's event loop."""

    def interrupt(self) -> None:
        """Make the running `execute` raise `Interrupted` soon. Called in another thread; may come late.

        Also called when no request of the batch is wanted any more.
        """


@runtime_checkable
class SubmittingInstance(BatchInstance, Protocol):
    """A `BatchInstance` that takes further batches while it works on one, so that its device never waits for the host.

    Up to `depth` batches, 2 or more, are under way at a time, each in a thread of the executor that joins its inputs,
    submits them, waits for the result and packs it: `started` is called once in each of these threads. With a sequence
    batcher or a rate limiter one batch is under way at a time, and `execute` may be called in place of `submit`.
    `InterruptibleInstance` is not heeded for it.
    """

    @property
    def depth(self) -> int:
        """How many batches may be under way; read once, when the instance was made."""

    def submit(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Future[Mapping[str, Array] | Outcome]:
        """Begin one batch and return without waiting for it. Inputs, outputs and errors are those of `execute`.

        Never called by two threads at once. The inputs stay as they are until the future is done; futures may become
        done in any order. An exception, raised here or set on the future, fails that batch alone; `InstanceDied` has to
        be the exception of every future under way. A future is cancelled when no request of its batch is wanted any
        more: call its `set_running_or_notify_cancel` before work on it begins, as the executors of
        `concurrent.futures` do. The instance is closed when nothing is under way.
        """


@runtime_checkable
class RequestInstance(Protocol):
    """An instance over single requests, run in a process (or event loop) of its own."""

    async def execute_requests(self, requests: Sequence[ModelRequest]) -> Sequence[ModelResponse]:
        """One response per request, in order. Raise `InstanceDied` when the instance can no longer be used.

        A requested output the model does not have is left out, or an error of its request.
        """

    async def close_instance(self) -> None:
        """Give up what the instance holds; a second call does nothing."""


@dataclass(slots=True)
class ColumnInput:
    """One input of all requests of a `RequestColumns`.

    `shape` is that of one request, as the model sees it (a configured reshape is applied). `data` holds the raw
    encodings of all requests, one after the other. `sizes` are the bytes of each request's part; None: all are equal.
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    data: Buffer
    sizes: Sequence[int] | None = None


@dataclass(slots=True)
class RequestColumns:
    """`count` requests of one form, each of which the model sees as a request of its own.

    `outputs` (the requested names, empty for all), `parameters` and `timeout_us` are those of every request. Their
    correlation ids and flags are 0, and none is traced: sequences and traced requests never come as columns.
    """

    count: int
    inputs: Sequence[ColumnInput]
    outputs: tuple[str, ...]
    parameters: Parameters = field(default_factory=dict)
    client_ids: Sequence[str] | None = None
    """The ids of the requests as their clients gave them; None: all are ""."""
    timeout_us: int = 0
    origins: Sequence[object] = ()
    """The `ModelRequest.origin` of each request, read only when the model calls another one; empty: none is known."""
    form: Hashable = None
    """Equal for columns that differ in `data` and `origins` alone; None: unknown."""


@dataclass(slots=True)
class ColumnOutput:
    """One output of all requests: `shape` is that of one request, `data` their raw encodings one after the other.

    Every request's part has the same size. `data` may lie in memory that is used again when no view of it is left.
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    data: Buffer


@runtime_checkable
class ColumnInstance(Protocol):
    """What a `RequestInstance` may be besides: one that takes requests of one form, and gives answers, as columns."""

    @property
    def takes_columns(self) -> bool:
        """Whether `execute_columns` may be called for this model; it never changes."""

    async def execute_columns(self, columns: RequestColumns) -> list[ColumnOutput] | Sequence[ModelResponse]:
        """Run the requests as one batch; the model sees `columns.count` of them, in order.

        Returns a `ColumnOutput` per output, at least one, when all answers are alike: the same names, datatypes, shapes
        and sizes in bytes, no error and no response parameters. Otherwise returns what `execute_requests` would for the
        same requests: one response per request. Raises what `execute_requests` raises.
        """

    def cancel_columns(self, columns: RequestColumns, indices: Sequence[int]) -> None:
        """Some of the requests being executed are settled already; like `CancellableInstance.cancel_requests`."""


class ResponseStream(Protocol):
    """Where the responses of one `execute_stream` go. Used in the event loop only.

    A thread hands a response over with `loop.call_soon_threadsafe`, and waits for room with
    `asyncio.run_coroutine_threadsafe(responses.drain(), loop).result()`.
    """

    def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
        """One response to the request at `index`; the last is `final`, alone (None) or with a response.

        A client of a stream gets every response, one without outputs too, but None only where it asked for it (G24).
        An error is one response among several, or the last. Raises `InternalError` after the final one, and
        `ValueError` for neither a response nor a final flag. A response with other outputs than configured fails.
        """

    @property
    def full(self) -> bool:
        """Whether `drain` would wait."""

    @property
    def blocked(self) -> bool:
        """Whether a request had as many responses as are wanted for now."""

    async def drain(self) -> None:
        """Wait until what was sent is no longer too much: await it after each `send`, or at least after large ones and
        while a request is `blocked`.

        Responses go to the log; a model that makes them faster than the log takes them is slowed here.
        """

    def free(self) -> None:
        """The instance takes the next batch, although responses are still to come. Returning says so at the latest."""


@runtime_checkable
class StreamingInstance(Protocol):
    """An instance over single requests that are answered zero, one or many times (decoupled models).

    The statistics of a decoupled model tell of its responses one by one (X5), unless it has an attribute
    `reports_responses = False`.
    """

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        """Answer through `responses`; return when each request has had its final response.

        After `responses.free()` the next call may come while this one goes on. Raise a `CharoniaError` to fail the
        requests without a final response (any other exception fails them as INTERNAL), `InstanceDied`, in every call
        under way, when the instance can no longer be used. One that returns early has those requests failed.
        """

    async def close_instance(self) -> None:
        """Give up what the instance holds; a second call does nothing. Calls under way end."""


@runtime_checkable
class WindowedInstance(Protocol):
    """What a `StreamingInstance` may be besides: one that itself holds back a model that gives too many responses.

    It heeds `ModelRequest.window`. With any other instance `drain` waits while a request of the call is `blocked`.
    """

    def allow_responses(self, request: ModelRequest, count: int) -> None:
        """So many responses may be given to a request that is being executed, from its first on. Must not block."""


@runtime_checkable
class LateAnswering(Protocol):
    """What an instance that is both a `RequestInstance` and a `StreamingInstance` may be besides.

    With `answers_later` it is used as the latter for a model that is not decoupled, too: each request gets exactly one
    response, final, and after `free` the next batch comes while responses are still to come. Not of models with
    sequences or with `preserve_ordering`.
    """

    answers_later: bool


@runtime_checkable
class CancellableInstance(Protocol):
    """What a `RequestInstance` or `StreamingInstance` may be besides: one that tells its model what is not wanted."""

    def cancel_requests(self, requests: Sequence[ModelRequest]) -> None:
        """Some of the requests being executed are cancelled. Must not block; may come too late, and again.

        They still get their (final) response, which no caller reads if they are `settled`.
        """


@runtime_checkable
class SelfCheckingInstance(Protocol):
    """What an instance of any shape may be besides: one that can tell whether it is ready to work (P6).

    It is asked in the event loop while it runs nothing, but a batch may come before it answers.
    """

    @property
    def checks_health(self) -> bool:
        """Whether this model has such a function; else it is never asked."""

    async def check_health(self) -> bool:
        """What the model says; an exception counts as no. May be cancelled when it takes too long."""


@runtime_checkable
class MeteredBackend(Protocol):
    """What a `Backend` may be besides: one whose models have metrics of their own, for the executor's page."""

    def render_metrics(self) -> bytes:
        """Text exposition 0.0.4 of families of this backend alone. Called in the event loop: must be quick."""


class InstanceDied(Exception):
    """The instance's process is gone or unusable: the executor replaces it and retries or fails its batch.

    `stderr` holds the last lines the process wrote. `blameless`: it was stopped for a reason that is not its batch's.
    `shared`: whether its batch ended it is unknown, as it ran others as well, or was killed from outside (ADR 0082).
    """

    def __init__(self, message: str, stderr: str = "", *, blameless: bool = False, shared: bool = False) -> None:
        super().__init__(message)
        self.stderr = stderr
        self.blameless = blameless
        self.shared = shared


class Interrupted(InstanceDied):
    """The execution was interrupted (`InterruptibleInstance`). The instance can be used, and runs the batch again."""


class DeviceLost(InstanceDied):
    """The process has lost its GPU: all that it does there fails until it ends. An isolated model's process ends with
    it, an executor whose own process it is ends after other batches had a few seconds.
    """

    def __init__(self, message: str) -> None:
        # work of other instances may have caused it: errors of a GPU are reported late, to the first that asks
        super().__init__(message, shared=True)


class Model(Protocol):
    """One load of a model's version: what its instances share, as weights and a compiled graph.

    A reload is another `Model`, also of the same files. Raise a `CharoniaError` whose message is the reason shown to
    the user. Everything but `create_instance` has a default, which classes inherit from this one.
    """

    async def signature(self) -> GraphSignature | ModelConfig | None:
        """What auto-complete may use: a file's signature, a completed config (python models), or None for nothing.

        Not called when auto-complete is off.
        """
        return None

    async def create_instance(self, spec: InstanceSpec) -> BatchInstance | RequestInstance | StreamingInstance:
        """Make one instance. Called for several at once; `spec.source` has the completed configuration.

        An instance that is both a `RequestInstance` and a `StreamingInstance` is used as the latter for decoupled
        models (`spec.interface.decoupled`), as the former for others. Of a decoupled model, one that is no
        `StreamingInstance` gives one response to each request.
        """

    async def close(self) -> None:
        """Give up what the model holds. Its instances were closed before; a second call does nothing."""
        return


class PlacedModel(Protocol):
    """What a `Model` may be besides: one whose `BatchInstance`s want their arrays elsewhere than in ordinary memory.

    Instances on GPUs get NumPy arrays in pinned memory, as far as the pool of the process has some ("pinned"), or
    arrays on their GPU that have `__dlpack__` ("device"; BYTES stay NumPy arrays): `charonia.exchange.device_arrays`.
    Instances on CPUs get NumPy arrays. All of them may return any array with `__dlpack__`, of the host or of a GPU.
    """

    wants: Wants
    """Read for each instance that is made; "host" is what a model without this attribute wants."""


@runtime_checkable
class TextModel(Protocol):
    """What a `Model` may be besides: one that generates text and knows its tokenizer, for gateways."""

    async def text_assets(self) -> bytes:
        """What `charonia.generation.text_assets.TextAssets.pack` gives; empty for a model without.

        Called after `signature` and before the first instance; the executor stores it in the log under its digest and
        names that in the configuration (`charonia.text_assets`).
        """


@runtime_checkable
class ReadableModel(Protocol):
    """What a `Model` of a backend that `opens_safely` may be besides: one whose files say more than a signature."""

    async def check_instance(self, spec: InstanceSpec) -> None:
        """Raise what keeps `create_instance` from making this instance, as far as reading data tells it."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a model holds of one memory, all of its instances together. `kind` is CPU, CPU_PINNED or GPU."""

    kind: Literal["CPU", "CPU_PINNED", "GPU"]
    device_id: int
    size_bytes: int


@runtime_checkable
class MeasuredModel(Protocol):
    """What a `Model` may be besides: one that knows what it holds, for the statistics of clients (X7)."""

    def memory(self) -> Sequence[MemoryUse]:
        """Called once after the warm-up of its instances, in a thread. An error is logged and changes nothing."""


class Backend(Protocol):
    """One per process and backend name; made by calling the entry point's object with no arguments.

    Everything but `name`, `api` and `load` has a default, which classes inherit from this one. Class attributes are
    read before a library is needed: the module of a backend imports its library in functions, not at its top.
    The methods `open`, `load`, `close` and `prefers_gpu` of an isolated model's backend are called in its process only.
    """

    name: str
    api: tuple[int, int]
    """The version of the contract it was written for."""

    formats: ClassVar[tuple[Format, ...]] = ()
    """What it reads, the usual format first."""
    supports: ClassVar[frozenset[Feature]] = frozenset()
    requires: ClassVar[tuple[tuple[str, str], ...]] = ()
    """The modules it imports later, each with what to install for it: without them its models are refused in words."""

    parallel_loading: ClassVar[bool] = True
    """Whether models are loaded, and their instances created, several at once."""

    opens_safely: ClassVar[bool] = False
    """Whether `load` and `signature` only read data, quickly and anywhere: `charonia check` calls them then."""

    isolation: ClassVar[Isolation] = "none"
    """Where its models run: "none" is the executor; "process" is a process for each model and device, for libraries
    that are slow to import or may crash; "sandbox" is such a process without other files, the network and further
    processes, for formats that can do more than compute. A model's parameter `charonia.isolation` overrides it."""

    strings_apart: ClassVar[bool] = False
    """True: its library keeps the interpreter's lock while it takes or gives many strings. The executor then runs
    batches with many, or whose answers are expected to have many, on a second copy of the model, in a process that is
    started for the first and ends when none has come for some time. Only for stateless instances over arrays on CPUs of
    models that run in the executor."""

    def isolation_of(self, source: ModelSource) -> Isolation:
        """The same for one model, of which the format may be known. Must not open its file."""
        return self.isolation

    def prefers_gpu(self) -> bool:
        """Whether instances of kind AUTO use a GPU when there is one (C8). May import the library."""
        return False

    async def open(self, settings: Mapping[str, str]) -> None:
        """Called once before the first model, with the settings of `--backend-config`. Raise what fails its load."""
        return

    async def close(self) -> None:
        """Called when the executor ends and no model is left; not after a crash."""
        return

    async def load(self, source: ModelSource) -> Model:
        """The model of a version; quick: what takes time may wait until `signature` or the first instance.

        `source.config` is as it was written: what auto-complete and defaults add comes with each instance.
        """


def __getattr__(name: str) -> Any:
    """The types of configurations, for code outside this project; late, as a model's own environment may not have them.

    Where protobuf is not installed, the rest of this module still works.
    """
    if name == "ModelConfig":
        from protos.model_config_pb2 import ModelConfig

        return ModelConfig
    if name == "ModelInterface":
        from .models.interface import ModelInterface

        return ModelInterface
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


__all__ = [
    "API",
    "ENTRY_POINT_GROUP",
    "FORMATS_ENTRY_POINT_GROUP",
    "Array",
    "Backend",
    "BatchInstance",
    "CancellableInstance",
    "ColumnInput",
    "ColumnInstance",
    "ColumnOutput",
    "DeviceLost",
    "Feature",
    "Format",
    "GraphSignature",
    "InstanceDied",
    "InstanceSpec",
    "Interrupted",
    "InterruptibleInstance",
    "Isolation",
    "LateAnswering",
    "MeasuredModel",
    "MemoryUse",
    "MeteredBackend",
    "Model",
    "ModelCalls",
    "ModelConfig",
    "ModelInterface",
    "ModelRequest",
    "ModelResponse",
    "ModelSource",
    "OpenCall",
    "Outcome",
    "PlacedModel",
    "RequestColumns",
    "RequestInstance",
    "ResponseStream",
    "SelfCheckingInstance",
    "StreamingInstance",
    "SubmittingInstance",
    "TensorSignature",
    "TextModel",
    "Timings",
    "Wants",
    "WindowedInstance",
]
