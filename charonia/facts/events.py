"""Facts: what happened, in the past tense, as plain data. The control facts of `ctl` and the facts of `f:{m}`.

A fact is written once and folded by every reader that needs it; unknown fields and unknown kinds of a newer release are
skipped. Wire form: a msgpack map with `kind`, so that an entry can be read by eye. Request and batch records are not
facts but their payload: see `charonia.wire`.

Longer than most modules because it is one list: a fact, or a free name for one, is looked up here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol

import msgpack

from charonia.errors import InvalidRecord
from charonia.tensors import Buffer

_log = logging.getLogger(__name__)

FIELD_FACT = b"e"


@dataclass(frozen=True, slots=True)
class ProcessJoined:
    """A gateway, batcher or executor started. `incarnation` is unique per start; `pool` is for executors.
    `payload_token` lies in its part of the payload directory: a process that can read it there shares the directory.
    """

    kind: ClassVar[str] = "process_joined"
    role: str
    incarnation: str
    pool: str = "default"
    host: str = ""
    pid: int = 0
    hosts_batcher: bool = False
    payload_token: str = ""
    reads_waves: bool = False
    """It can own queues with waves in them; older releases would lose those."""
    pid_space: str = ""
    """The boot and the pid namespace to which `pid` belongs (`charonia.eventlog.neighbours`)."""
    started_ticks: int = 0
    """When it was started there: pids are reused."""
    reads_wave_slots: bool = False
    """It reads waves whose column lies in a slot (`charonia.wire.waves`); older releases drop those."""

    @property
    def owns_queues(self) -> bool:
        """Whether it is a batcher, or an executor with one."""
        return self.role == "batcher" or self.hosts_batcher


@dataclass(frozen=True, slots=True)
class ProcessLeft:
    """A process ended: by itself (`reason` "drained") or because its heartbeat did (`reason` "lost")."""

    kind: ClassVar[str] = "process_left"
    role: str
    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class ExecutorDescribed:
    """The properties of an executor, reported again when they changed; the last report counts.

    `labels` are what placement asks for (`charonia.models.placement`), several values of one joined by commas. For
    models on demand `used_bytes` of `budget_bytes` and `loaded_models` of `most_models` are in use, 0 for no bound.
    """

    kind: ClassVar[str] = "executor_described"
    executor: str
    labels: dict[str, str]
    used_bytes: int = 0
    budget_bytes: int = 0
    loaded_models: int = 0
    most_models: int = 0


@dataclass(frozen=True, slots=True)
class ExecutorDraining:
    """An executor takes no more batches and finishes those it has. Requests for its versions wait for its successor."""

    kind: ClassVar[str] = "executor_draining"
    executor: str


@dataclass(frozen=True, slots=True)
class RepositoryScanned:
    """An executor has scanned its repository and tried to load what its control mode requires; `models` are all names
    found. `control_mode` is none, poll or explicit. `ready` is false while the start-up load still runs.
    `registered` are the repositories that load requests brought, as keys of their models, by the requests' aliases.
    """

    kind: ClassVar[str] = "repository_scanned"
    executor: str
    models: tuple[str, ...]
    control_mode: str
    ready: bool
    registered: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelRequested:
    """A load or unload of a model was asked for. `request_id` ties the answers to the call that waits for them.

    `config_json` is a complete configuration (R24), empty for none; `files` maps `<version>/<path>` to a blob id (R25).
    With an `alias` a load registers the repository that `directory` holds or is in, and an unload takes it away (H55).
    """

    kind: ClassVar[str] = "model_requested"
    action: str
    model: str
    request_id: str
    config_json: str = ""
    files: dict[str, str] = field(default_factory=dict)
    unload_dependents: bool = False
    alias: str = ""
    directory: str = ""


@dataclass(frozen=True, slots=True)
class ModelRequestFinished:
    """An executor has done what a `ModelRequested` asked; `error` is empty on success."""

    kind: ClassVar[str] = "model_request_finished"
    executor: str
    request_id: str
    error_code: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class VersionStateChanged:
    """An executor began to load or unload a version: `state` is LOADING or UNLOADING."""

    kind: ClassVar[str] = "version_state_changed"
    executor: str
    model: str
    version: int
    state: str


@dataclass(frozen=True, slots=True)
class VersionLoaded:
    """A version is ready on an executor. `config` is the serialised, normalised, autofilled `inference.ModelConfig`.

    `slots` is the number of batches it executes at once (its instances). A second VersionLoaded of the same version
    replaces the first: new batches go to the new incarnation, whose `content_hash` differs. `labels` holds the label
    lines of outputs with a label file (H19).
    """

    kind: ClassVar[str] = "version_loaded"
    executor: str
    model: str
    version: int
    content_hash: str
    slots: int
    config: bytes
    labels: dict[str, list[str]] = field(default_factory=dict)
    load_ns: int = 0
    takes_waves: bool = False
    """Its requests may come in waves (docs/adr/0015)."""
    memory: dict[str, int] = field(default_factory=dict)
    """What it holds, in bytes, by kind of memory and number of the device: "GPU 0"."""
    override_id: str = ""
    """The `request_id` of the load that brought its configuration or files; "" where all is the repository's."""
    override_config: str = ""
    """That load's `config_json`, unless it brought files as well."""


@dataclass(frozen=True, slots=True)
class VersionAnnounced:
    """An executor can load a version on demand and has not loaded it now; otherwise as `VersionLoaded`."""

    kind: ClassVar[str] = "version_announced"
    executor: str
    model: str
    version: int
    content_hash: str
    config: bytes
    labels: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionHeld:
    """A version that an executor announced is in its memory and runs `slots` batches at once; 0: it is not there.
    Written often; one that another follows is soon deleted (`batcher.housekeeping.compaction`).
    """

    kind: ClassVar[str] = "version_held"
    executor: str
    model: str
    version: int
    slots: int
    load_ns: int = 0


@dataclass(frozen=True, slots=True)
class VersionWanted:
    """From a model's owner to an executor, in its batch stream: requests wait for a version it announced."""

    kind: ClassVar[str] = "version_wanted"
    model: str
    version: int


@dataclass(frozen=True, slots=True)
class ModelExcluded:
    """A model is not placed on an executor (`charonia.models.placement`), or others serve files of a load request that
    it does not have: it does not load the model.
    """

    kind: ClassVar[str] = "model_excluded"
    executor: str
    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class VersionFailed:
    """A version could not be loaded on an executor; `message` is the reason the index shows (H40, R21).

    `unpolled`: its configuration cannot be used, or the models of the ensemble are missing or do not fit, so that
    Triton would not begin to load it (C52, C62).
    """

    kind: ClassVar[str] = "version_failed"
    executor: str
    model: str
    version: int
    error_code: int
    message: str
    unpolled: bool = False


@dataclass(frozen=True, slots=True)
class VersionUnloaded:
    """A version is no longer served by an executor."""

    kind: ClassVar[str] = "version_unloaded"
    executor: str
    model: str
    version: int
    reason: str = "unloaded"


@dataclass(frozen=True, slots=True)
class VersionHealthChanged:
    """The health function of a loaded model has a new result; a version is healthy when it is loaded (P6)."""

    kind: ClassVar[str] = "version_health_changed"
    executor: str
    model: str
    version: int
    well: bool


@dataclass(frozen=True, slots=True)
class LaneOpened:
    """A queue stream came into being (written to `f:{m}` by the accept script)."""

    kind: ClassVar[str] = "lane_opened"
    level: int
    lane: int


@dataclass(frozen=True, slots=True)
class BatchFinished:
    """An executor has settled every request of a batch and its slot is free.

    With `BatchHeader.via_owner`, `replies` holds (endpoint, response record) pairs for the owner to release in order.
    `tokens` is how many its requests had, of prompts and answers; 0 where they are not counted.
    """

    kind: ClassVar[str] = "batch_finished"
    executor: str
    batch_id: str
    replies: tuple[tuple[str, bytes], ...] = ()
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class BatchReturned:
    """An executor returns a batch unexecuted (it drains, or no longer has the version); no request is to blame."""

    kind: ClassVar[str] = "batch_returned"
    executor: str
    batch_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """A caller no longer wants a request (`id` is 16 bytes).

    `gentle`: it reads on (P13). A request that waits ends all the same; the model of one that runs is notified.
    """

    kind: ClassVar[str] = "request_cancelled"
    id: bytes
    gentle: bool = False


@dataclass(frozen=True, slots=True)
class BatchDied:
    """A batch took its instance down with it (poison isolation). Its requests are unsettled; the slot is free.

    `stderr` holds the last lines the instance wrote. `blameless` is true when the instance was being closed, was ended
    by SIGTERM, or ended in a check or before the batch came: then the batch is dispatched again as it is. A process
    that the kernel kills for memory is not blameless. `instance` is the name that P19's text has. `ids` are the
    requests without an outcome, 16 bytes each, joined: an owner that did not give the batch out itself learns from them
    whom to suspect.
    """

    kind: ClassVar[str] = "batch_died"
    executor: str
    batch_id: str
    reason: str
    stderr: str = ""
    blameless: bool = False
    instance: str = ""
    ids: bytes = b""


@dataclass(frozen=True, slots=True)
class BatchDiedInCompany:
    """A batch was with an instance that died, and what it died of is unknown: others were with it, or it was killed
    from outside, as by a kernel without memory (ADR 0082).

    Fields as of `BatchDied`.
    """

    kind: ClassVar[str] = "batch_died_in_company"
    executor: str
    batch_id: str
    reason: str
    stderr: str = ""
    instance: str = ""
    ids: bytes = b""


@dataclass(frozen=True, slots=True)
class SlotFreed:
    """An instance takes the next batch although some of this one's requests have responses still to come."""

    kind: ClassVar[str] = "slot_freed"
    executor: str
    batch_id: str


@dataclass(frozen=True, slots=True)
class ResponsesBegun:
    """The first responses of requests (`ids`, 16 bytes each, joined) become visible now, and more are to come."""

    kind: ClassVar[str] = "responses_begun"
    executor: str
    batch_id: str
    ids: bytes


@dataclass(frozen=True, slots=True)
class OwnerChanged:
    """From a new owner to an executor, in its batch stream: report again the freed and begun batches of the model."""

    kind: ClassVar[str] = "owner_changed"
    model: str


@dataclass(frozen=True, slots=True)
class StatisticsWanted:
    """From a gateway to an executor, in its batch stream: write pending counts, then answer `endpoint` with `token`."""

    kind: ClassVar[str] = "statistics_wanted"
    endpoint: str
    token: str


@dataclass(frozen=True, slots=True)
class StatisticsWritten:
    """From an executor to the gateway that asked, in its reply stream: everything counted before is in the log."""

    kind: ClassVar[str] = "statistics_written"
    executor: str
    token: str


@dataclass(frozen=True, slots=True)
class RequestsEnded:
    """Requests were settled from outside before they were done (a cancel, a deadline); `ids` are 16 bytes each, joined.
    The owner removes them from its queue and notifies the executors that run them (`ExecutionUnwanted`).
    """

    kind: ClassVar[str] = "requests_ended"
    ids: bytes
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RequestsMoved:
    """An operator moves queued requests to another entry of their queue (`ids` are 16 bytes each, joined), which is
    written when this fact was read. An owner that reads a known request from another entry moves it. Owners of older
    releases did not, and forgot the requests before.
    """

    kind: ClassVar[str] = "requests_moved"
    ids: bytes


@dataclass(frozen=True, slots=True)
class ExecutionUnwanted:
    """The owner to an executor, in its batch stream: these requests of a batch are settled already (`ids` joined).

    Those in `gentle` (joined as well) are not, and their responses are wanted: only their model is notified.
    """

    kind: ClassVar[str] = "execution_unwanted"
    batch_id: str
    ids: bytes
    gentle: bytes = b""


@dataclass(frozen=True, slots=True)
class ResponsesWanted:
    """For a request with a window (S55): responses below index `count` are wanted; may be repeated. From its caller to
    the model's owner, with an empty `batch_id`; from the owner to the executor that has it in this batch.
    """

    kind: ClassVar[str] = "responses_wanted"
    batch_id: str
    id: bytes
    count: int


@dataclass(frozen=True, slots=True)
class QueueCommanded:
    """From an operator to a model's owner: `action` is pause or resume; the state lies in `n:{m}` (`paused`)."""

    kind: ClassVar[str] = "queue_commanded"
    action: str


@dataclass(frozen=True, slots=True)
class RequestsRescheduled:
    """A model wants another turn for these requests of a batch (S41; `ids` joined). Written before the batch's end."""

    kind: ClassVar[str] = "requests_rescheduled"
    executor: str
    batch_id: str
    ids: bytes


@dataclass(frozen=True, slots=True)
class LanesWeighed:
    """How the lanes of a level share: `weights` maps a lane's number to its weight, 1 where it is not named.

    Written by gateways that know tenants, whole each time; the last one counts.
    """

    kind: ClassVar[str] = "lanes_weighed"
    weights: dict[str, int]


@dataclass(frozen=True, slots=True)
class TraceSettingChanged:
    """How requests to a model ("" for all) are traced from now on: field to value, those only that were changed (N2).

    `counted` names the count of traced requests that a bound in `settings` is held against.
    """

    kind: ClassVar[str] = "trace_setting_changed"
    model: str
    settings: dict[str, int]
    counted: str


@dataclass(frozen=True, slots=True)
class RouteChanged:
    """Which version requests to a model that name none go to (`charonia.releases.route_rule`).

    `rule` is the whole rule as a JSON object, "" for none any more. Of several facts of a model the one with the
    largest `revision` counts, of equal ones the first: so of two writers that have read the same rule one has no
    effect. Written by gateways and by `charonia route`.
    """

    kind: ClassVar[str] = "route_changed"
    model: str
    revision: int
    rule: str


Fact = (
    ProcessJoined
    | ProcessLeft
    | RepositoryScanned
    | ModelRequested
    | ModelRequestFinished
    | VersionStateChanged
    | VersionLoaded
    | VersionFailed
    | VersionUnloaded
    | VersionHealthChanged
    | LaneOpened
    | BatchFinished
    | BatchReturned
    | RequestCancelled
    | BatchDied
    | RequestsEnded
    | RequestsMoved
    | ExecutionUnwanted
    | QueueCommanded
    | RequestsRescheduled
    | LanesWeighed
    | TraceSettingChanged
    | BatchDiedInCompany
    | SlotFreed
    | ResponsesBegun
    | ResponsesWanted
    | OwnerChanged
    | StatisticsWanted
    | StatisticsWritten
    | ExecutorDescribed
    | ExecutorDraining
    | VersionAnnounced
    | VersionHeld
    | VersionWanted
    | ModelExcluded
    | RouteChanged
)

_BUILT_IN: dict[str, type[Any]] = {t.__name__: t for t in (str, int, bool, bytes, tuple, dict)}
_KINDS: dict[str, type[Any]] = {cls.kind: cls for cls in Fact.__args__}
_FIELDS: dict[str, tuple[str, ...]] = {kind: tuple(f.name for f in fields(cls)) for kind, cls in _KINDS.items()}
_TYPES: dict[str, dict[str, type[Any]]] = {
    kind: {f.name: _BUILT_IN[str(f.type).partition("[")[0]] for f in fields(cls)} for kind, cls in _KINDS.items()
}


_ADDED = frozenset(
    {"reads_waves", "takes_waves", "pid_space", "started_ticks", "gentle", "alias", "directory", "registered", "memory"}
    | {"tokens", "reads_wave_slots", "unpolled", "override_id", "override_config"}
)
"""Fields added to kinds of an earlier release: left out at their default, as that release would write the fact."""


def pack_fact(fact: Fact) -> bytes:
    """The wire form of a fact."""
    body = {name: value for name in _FIELDS[fact.kind] if (value := getattr(fact, name)) or name not in _ADDED}
    body["kind"] = fact.kind
    return bytes(msgpack.packb(body))


def _is_reply(value: object) -> bool:
    return type(value) is tuple and len(value) == 2 and type(value[0]) is str and type(value[1]) is bytes


def unpack_fact(data: Buffer | Fact) -> Fact | None:
    """The fact, or None for a kind of a newer release; an object that never left its process is returned as it is.
    Raises `InvalidRecord` for bytes that are no fact.
    """
    if isinstance(data, BatchFinished):
        return data
    try:
        body: dict[str, Any] = msgpack.unpackb(data, use_list=False)
        cls = _KINDS.get(body["kind"])
        if cls is None:
            return None
        types = _TYPES[cls.kind]
        known = {name: value for name, value in body.items() if name in types}
        for name, value in known.items():
            if type(value) is not types[name]:
                raise TypeError(f"'{name}' of {cls.kind} is a {type(value).__name__}")
            if types[name] is dict:  # lists come back as tuples
                known[name] = {k: list(v) if type(v) is tuple else v for k, v in value.items()}
        if cls is BatchFinished and not all(_is_reply(reply) for reply in known.get("replies", ())):
            raise TypeError("'replies' are no pairs of endpoint and record")
        fact: Fact = cls(**known)
        return fact
    except Exception as error:
        raise InvalidRecord(f"fact cannot be read: {error}") from None


class StreamEntry(Protocol):
    """What is read of an entry of the log: `charonia.eventlog.port.Entry`."""

    @property
    def id(self) -> bytes: ...

    @property
    def fields(self) -> Sequence[Buffer]:
        """Names and values in turn."""


def facts_of(entry: StreamEntry) -> list[Fact]:
    """The facts an entry carries; unreadable ones and those of newer releases are skipped and logged."""
    found: list[Fact] = []
    fields = entry.fields
    for i in range(0, len(fields) - 1, 2):
        if bytes(fields[i]) != FIELD_FACT:
            continue
        try:
            fact = unpack_fact(fields[i + 1])
        except InvalidRecord as error:
            _log.error("skipped an unreadable fact in entry %s: %s", entry.id.decode(errors="replace"), error)
            continue
        if fact is not None:
            found.append(fact)
    return found
