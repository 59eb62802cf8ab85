"""The frozen, typed view of a model's configuration that request paths read instead of protobuf.

Built once per loaded model from a normalised, validated configuration (`executors.configuration.config`). Batching is
decided by the scheduler, shapes are checked by the gateway.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from charonia.datatypes import DataType
from protos import model_config_pb2 as pb

from .metric_control import tag_labels
from .repeatable import is_repeatable, is_resumable
from .scheduling import DynamicBatching
from .sequence_batcher import SequenceBatching

DEFAULT_SCHEDULING = "default"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output. `dims` and `reshape` carry no batch dimension; -1 stands for any size (items C5-C7, I7).

    `reshape` is what the backend sees instead of `dims`, or `None`; an empty tuple is a scalar for each batch item.
    """

    name: str
    datatype: DataType
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    optional: bool = False
    allow_ragged_batch: bool = False
    label_filename: str = ""

    @property
    def backend_dims(self) -> tuple[int, ...]:
        """The dims the backend sees, without the batch dimension."""
        return self.dims if self.reshape is None else self.reshape


def translate(dims: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    """Reshape `dims`, which match `source`, to `target`. Variable sizes are matched in order (I7)."""
    sizes = iter([size for size, pattern in zip(dims, source, strict=True) if pattern == -1])
    return tuple(next(sizes) if size == -1 else size for size in target)


@dataclass(frozen=True, slots=True)
class BatchInput:
    """A tensor the executor makes for each batch from the shapes of input `source` (C20). `kind` as in the proto."""

    kind: str
    targets: tuple[str, ...]
    datatype: DataType
    source: str


@dataclass(frozen=True, slots=True)
class ResourceNeed:
    """What each execution of a group's instances holds (C10): `count` of a resource of its device, or of all."""

    name: str
    count: int
    is_global: bool = False


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """Equal instances; `kind` is KIND_CPU, KIND_GPU or KIND_MODEL once resolved; `count` is for each of `gpus` (C8).

    `resources` and `priority` matter when the executor limits rates (Q1-Q4); `priority` 0 counts as 1.
    """

    name: str
    count: int
    kind: str
    gpus: tuple[int, ...] = ()
    profile: tuple[str, ...] = ()
    passive: bool = False
    host_policy: str = ""
    resources: tuple[ResourceNeed, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """Data of one warm-up tensor: `source` is "zero", "random" or "file"; `filename` lies in `warmup/` (C17)."""

    datatype: DataType
    dims: tuple[int, ...]
    source: str
    filename: str = ""


@dataclass(frozen=True, slots=True)
class Warmup:
    """A made-up request, run `count` times on each instance with `batch_size` items (0 and unset are 1) (C17)."""

    name: str
    batch_size: int
    count: int
    inputs: dict[str, WarmupInput]


@dataclass(frozen=True, slots=True)
class ModelInterface:
    """What one loaded model takes and gives. Mappings keep the order of the configuration and are never changed.

    `scheduling` is "default", "dynamic_batching", "sequence_batching" or "ensemble_scheduling" (C14).
    """

    name: str
    backend: str
    platform: str
    max_batch_size: int
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    scheduling: str = DEFAULT_SCHEDULING
    decoupled: bool = False
    dynamic_batching: DynamicBatching | None = None
    sequence_batching: SequenceBatching | None = None
    instance_groups: tuple[InstanceGroup, ...] = ()
    default_model_filename: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    warmups: tuple[Warmup, ...] = ()
    metric_tags: dict[str, str] = field(default_factory=dict)
    required_inputs: frozenset[str] = frozenset()
    """Names of the inputs that are not optional (I4, I8)."""
    batch_inputs: tuple[BatchInput, ...] = ()
    scattered_outputs: dict[str, str] = field(default_factory=dict)
    """Output to the input by whose shapes it is cut apart (`batch_output`, C21)."""

    batching: bool = field(init=False)
    """Whether request tensors have a leading batch dimension (T7)."""
    repeatable: bool = field(init=False)
    """Whether a request whose first responses were seen may be run again from its beginning."""
    resumable: bool = field(init=False)
    """Whether another run of a request is given the progress of the lost one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "batching", self.max_batch_size > 0)
        object.__setattr__(self, "repeatable", is_repeatable(self.parameters))
        object.__setattr__(self, "resumable", is_resumable(self.parameters))

    @property
    def generates_text(self) -> bool:
        """Whether it takes prompts one by one and gives text in several responses."""
        takes = not self.inputs.keys().isdisjoint(("text_input", "prompt_token_ids"))
        return self.decoupled and takes and "text_output" in self.outputs and not self.batching

    @property
    def has_ragged_input(self) -> bool:
        return any(spec.allow_ragged_batch for spec in self.inputs.values())

    def client_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """The shape clients see in metadata: `dims`, with a leading -1 for a batching model (H5)."""
        return (-1, *spec.dims) if self.max_batch_size > 0 else spec.dims

    def backend_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """The shape the backend sees: `reshape` or `dims`, with a leading -1 for a batching model (I7)."""
        return (-1, *spec.backend_dims) if self.max_batch_size > 0 else spec.backend_dims

    @staticmethod
    def of(config: pb.ModelConfig) -> ModelInterface:
        """The view of a normalised, validated configuration. Raises `InvalidArgument` for a tensor without a type."""
        inputs = {item.name: _input(item) for item in config.input}
        scheduling = config.WhichOneof("scheduling_choice") or DEFAULT_SCHEDULING
        return ModelInterface(
            name=config.name,
            backend=config.backend,
            platform=config.platform,
            max_batch_size=config.max_batch_size,
            inputs=inputs,
            outputs={item.name: _output(item) for item in config.output},
            scheduling=scheduling,
            decoupled=config.model_transaction_policy.decoupled,
            dynamic_batching=(
                DynamicBatching.of(config.dynamic_batching) if scheduling == "dynamic_batching" else None
            ),
            sequence_batching=SequenceBatching.of(config) if scheduling == "sequence_batching" else None,
            instance_groups=tuple(_instance_group(group) for group in config.instance_group),
            default_model_filename=config.default_model_filename,
            parameters={key: value.string_value for key, value in sorted(config.parameters.items())},
            warmups=tuple(_warmup(item) for item in config.model_warmup),
            metric_tags=tag_labels(config),
            required_inputs=frozenset(name for name, spec in inputs.items() if not spec.optional),
            batch_inputs=tuple(_batch_input(item) for item in config.batch_input),
            scattered_outputs={name: item.source_input[0] for item in config.batch_output for name in item.target_name},
        )


def _input(item: pb.ModelInput) -> TensorSpec:
    return TensorSpec(
        name=item.name,
        datatype=DataType.of_number(item.data_type),
        dims=tuple(item.dims),
        reshape=tuple(item.reshape.shape) if item.HasField("reshape") else None,
        optional=item.optional,
        allow_ragged_batch=item.allow_ragged_batch,
    )


def _output(item: pb.ModelOutput) -> TensorSpec:
    return TensorSpec(
        name=item.name,
        datatype=DataType.of_number(item.data_type),
        dims=tuple(item.dims),
        reshape=tuple(item.reshape.shape) if item.HasField("reshape") else None,
        label_filename=item.label_filename,
    )


def _batch_input(item: pb.BatchInput) -> BatchInput:
    return BatchInput(
        kind=pb.BatchInput.Kind.Name(item.kind),
        targets=tuple(item.target_name),
        datatype=DataType.of_number(item.data_type),
        source=item.source_input[0],
    )


def _instance_group(group: pb.ModelInstanceGroup) -> InstanceGroup:
    return InstanceGroup(
        name=group.name,
        count=group.count,
        kind=pb.ModelInstanceGroup.Kind.Name(group.kind),
        gpus=tuple(group.gpus),
        profile=tuple(group.profile),
        passive=group.passive,
        host_policy=group.host_policy,
        resources=tuple(
            ResourceNeed(resource.name, resource.count, getattr(resource, "global"))
            for resource in group.rate_limiter.resources
        ),
        priority=group.rate_limiter.priority,
    )


_WARMUP_SOURCES = {"zero_data": "zero", "random_data": "random", "input_data_file": "file"}


def _warmup(item: pb.ModelWarmup) -> Warmup:
    return Warmup(
        name=item.name,
        batch_size=max(1, item.batch_size),
        count=max(1, item.count),
        inputs={name: _warmup_input(item.inputs[name]) for name in sorted(item.inputs)},
    )


def _warmup_input(item: pb.ModelWarmup.Input) -> WarmupInput:
    choice = item.WhichOneof("input_data_type") or "zero_data"
    return WarmupInput(
        datatype=DataType.of_number(item.data_type),
        dims=tuple(item.dims),
        source=_WARMUP_SOURCES[choice],
        filename=item.input_data_file,
    )
