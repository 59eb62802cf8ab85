"""Validates the parts of a configuration: inputs and outputs, instance groups, `dynamic_batching`, ensembles, warm-up.

`config` calls these checks, and `sequence_validation` has those of `sequence_batching`. Every field is parsed and
validated; an unsupported one is rejected with an error that names it (`unsupported_features`), never ignored.
`executors.loading.composing_models` checks the models that an ensemble is composed of (C52).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod

from charonia.backend import Feature
from charonia.models.config_errors import InstanceError, StructureError
from charonia.models.ensemble import CONDITION
from protos import model_config_pb2 as pb

from .declarations import declared_by
from .platforms import ENSEMBLE

_TENSORRT = "tensorrt_plan"
_UNKNOWN_ID = "[request id: <id_unknown>] "


def check_tensors(config: pb.ModelConfig) -> None:
    """Raise `InstanceError` for the first input or output that breaks C5-C7."""
    names: set[str] = set()
    for item in config.input:
        with _naming(config):
            _check_tensor(item, config.max_batch_size, "model input")
            if item.format != pb.ModelInput.FORMAT_NONE and len(item.dims) != 3:
                raise InstanceError("model input NHWC/NCHW require 3 dims")
            _check_tensorrt_only(item, config)
        _check_unique(item.name, names, "input", config.name)
    names = set()
    for output in config.output:
        with _naming(config):
            _check_tensor(output, config.max_batch_size, "model output")
            _check_tensorrt_only(output, config)
        _check_unique(output.name, names, "output", config.name)


def check_reshapes(config: pb.ModelConfig) -> None:
    """Raise `InstanceError` for a written reshape that breaks C7. Call it before tensors are compared with a graph."""
    tensors: list[tuple[pb.ModelInput | pb.ModelOutput, str]] = [(item, "model input") for item in config.input]
    tensors += [(item, "model output") for item in config.output]
    for item, subject in tensors:
        if item.dims and item.HasField("reshape"):
            with _naming(config):
                _check_reshape(item.dims, item.reshape.shape, f"{subject} '{item.name}'")


@contextmanager
def _naming(config: pb.ModelConfig) -> Iterator[None]:
    """Put the model's name behind the texts of errors, as Triton does for all checks of tensors and batch I/O."""
    try:
        yield
    except InstanceError as error:
        raise InstanceError(f"{error.message} for {config.name}") from None


def _check_unique(name: str, names: set[str], what: str, model_name: str) -> None:
    if name in names:
        raise InstanceError(f"{what} '{name}' is specified more than once for model '{model_name}'")
    names.add(name)


def _check_tensor(item: pb.ModelInput | pb.ModelOutput, max_batch_size: int, subject: str) -> None:
    if not item.name:
        raise InstanceError(f"{subject} must specify 'name'")
    subject = f"{subject} '{item.name}'"
    if item.data_type == pb.TYPE_INVALID:
        raise InstanceError(f"{subject} must specify 'data_type'")
    if item.data_type not in pb.DataType.values():
        raise InstanceError(f"{subject} has the unknown 'data_type' number {item.data_type}")
    if not item.dims:
        raise InstanceError(f"{subject} must specify 'dims'")
    reshaped = item.HasField("reshape")
    if reshaped and not item.reshape.shape and max_batch_size == 0:
        raise InstanceError(
            f"{subject} cannot have empty reshape for non-batching model as scalar tensors are not supported"
        )
    if any(dim < 1 and dim != -1 for dim in item.dims):
        raise InstanceError(f"{subject} dimension must be integer >= 1, or -1 to indicate a variable-size dimension")
    if reshaped:
        _check_reshape(item.dims, item.reshape.shape, subject)


def _check_reshape(dims: Sequence[int], reshape: Sequence[int], subject: str) -> None:
    """Check a reshape (C7): equal products; with variable sizes, equal products of each run between them (I7)."""
    if any(dim < 1 and dim != -1 for dim in reshape):
        raise InstanceError(
            f"{subject} reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension"
        )
    before, after = _fixed_runs(dims), _fixed_runs(reshape)
    if (len(before) > 1) != (len(after) > 1):
        raise InstanceError(f"{subject} has different size for dims and reshape")
    if len(before) != len(after):
        raise InstanceError(f"{subject} has different number of variable-size dimensions for dims and reshape")
    if before != after:
        raise InstanceError(f"{subject} has different size for dims and reshape")


def _fixed_runs(dims: Sequence[int]) -> list[int]:
    """Products of the runs of fixed sizes around the variable ones: [2, 4, -1, 6] is [8, 6]."""
    runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            runs.append([])
        else:
            runs[-1].append(dim)
    return [prod(run) for run in runs]


def _check_tensorrt_only(item: pb.ModelInput | pb.ModelOutput, config: pb.ModelConfig) -> None:
    if config.platform == _TENSORRT:
        return
    if item.is_shape_tensor:
        raise InstanceError("shape tensors are only supported for TensorRT platform")
    if item.is_non_linear_format_io:
        raise InstanceError("Non-linear IO format is only supported for the TensorRT platform")


def check_batch_io(config: pb.ModelConfig) -> None:
    """Raise `InstanceError` for the first batch input or output that breaks C20 or C21."""
    with _naming(config):
        _check_batch_io(config)


def _check_batch_io(config: pb.ModelConfig) -> None:
    inputs = {item.name for item in config.input}
    outputs = {item.name for item in config.output}
    for item in config.batch_input:
        _check_sources(item.source_input, inputs, f"batch input kind '{pb.BatchInput.Kind.Name(item.kind)}'")
        if item.data_type not in (pb.TYPE_INT32, pb.TYPE_FP32):
            raise InstanceError("batch input data type must be TYPE_INT32 or TYPE_FP32")
    targets: set[str] = set()
    for output in config.batch_output:
        _check_sources(output.source_input, inputs, f"batch output kind '{pb.BatchOutput.Kind.Name(output.kind)}'")
        for target in output.target_name:
            if target not in outputs:
                raise InstanceError(f"unknown target output name '{target}'")
            if target in targets:
                raise InstanceError(f"target output name '{target}' can only be specified once")
            targets.add(target)


def _check_sources(sources: Sequence[str], inputs: set[str], subject: str) -> None:
    if len(sources) != 1:
        raise InstanceError(f"{subject} expects 1 source input, got {len(sources)}")
    for source in sources:
        if source not in inputs:
            raise InstanceError(f"unknown source input name '{source}'")


def check_instance_groups(config: pb.ModelConfig, gpus: int) -> None:
    """Raise `InstanceError` with C9's text. `gpus` is the number of devices. The groups' kinds must be resolved."""
    if config.HasField("ensemble_scheduling"):
        return
    if not config.instance_group:
        raise InstanceError(f"must specify one or more 'instance group's for {config.name}")
    kinds = pb.ModelInstanceGroup
    for group in config.instance_group:
        subject = f"instance group {group.name} of model {config.name}"
        if group.kind in (kinds.KIND_MODEL, kinds.KIND_CPU) and group.gpus:
            kind = kinds.Kind.Name(group.kind)
            raise InstanceError(f"{subject} has kind {kind} but specifies one or more GPUs")
        if group.kind == kinds.KIND_GPU:
            if not group.gpus:
                if gpus == 0:
                    raise InstanceError(f"{subject} has kind KIND_GPU but no GPUs are available")
                raise InstanceError(f"{subject} has kind KIND_GPU but specifies no GPUs")
            for gpu in group.gpus:
                if not 0 <= gpu < gpus:
                    known = ", ".join(map(str, range(gpus)))
                    raise InstanceError(
                        f"{subject} specifies invalid or unsupported gpu id {gpu}. GPUs with at least the minimum "
                        f"required CUDA compute compatibility of 6.000000 are: {known}"
                    )
        if group.profile and config.platform != _TENSORRT:
            raise InstanceError(
                f"{subject} and platform {config.platform}specifies profile field which is only supported for "
                "TensorRT models"
            )


def check_dynamic_batching(config: pb.ModelConfig, name: str) -> None:
    """Raise `StructureError` with C32's text for the first rule that the block breaks."""
    block = config.dynamic_batching
    check_preferred_sizes(
        block.preferred_batch_size, config.max_batch_size, name, subject="dynamic batching preferred size"
    )
    levels = block.priority_levels
    if levels:
        if not 1 <= block.default_priority_level <= levels:
            raise StructureError(f"default priority level must be in range [1, {levels}] for {name}")
        if any(not 1 <= level <= levels for level in block.priority_queue_policy):
            raise StructureError(f"priority queue policy must have priority level in range [1, {levels}] for {name}")
    if block.preserve_ordering:
        if levels > 1:
            raise StructureError(f"Only one priority level is allowed when 'preserve_ordering' is true for {name}")
        policies = [block.default_queue_policy, *block.priority_queue_policy.values()]
        if any(_delays(policy) for policy in policies):
            raise StructureError(
                f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {name}"
            )


def check_preferred_sizes(sizes: Iterable[int], max_batch_size: int, name: str, *, subject: str) -> None:
    """Raise `StructureError` unless all sizes are in 1..`max_batch_size`. The message begins with `subject`."""
    for size in sizes:
        if size <= 0:
            raise StructureError(f"{subject} must be positive for {name}")
        if size > max_batch_size:
            raise StructureError(f"{subject} must be <= max batch size for {name}")


def _delays(policy: pb.ModelQueuePolicy) -> bool:
    # without a time-out the action never happens, so it cannot break the order
    return policy.timeout_action == pb.ModelQueuePolicy.DELAY and policy.default_timeout_microseconds != 0


def check_ensemble(config: pb.ModelConfig, name: str) -> None:
    """Raise `StructureError` with C51's text for the first broken rule. Models that are none break one at most."""
    if not config.HasField("ensemble_scheduling"):
        if config.platform != ENSEMBLE:
            return
        raise StructureError(f"ensemble scheduling must be set for ensemble '{name}' whose platform is '{ENSEMBLE}'")
    if (config.platform and config.platform != ENSEMBLE) or config.backend:
        raise StructureError(f"ensemble scheduling cannot be set for model '{name}' whose platform is not '{ENSEMBLE}'")
    if config.instance_group:
        raise StructureError(f"instance group should not be specified for ensemble '{name}'")
    if config.HasField("optimization"):
        raise StructureError(f"optimization should not be specified for ensemble '{name}'")
    if config.model_warmup:
        raise StructureError(f"model_warmup can not be specified for ensemble '{name}'")
    if not config.ensemble_scheduling.step:
        raise StructureError(f"must specify 'step' for ensemble '{name}'")
    _check_graph(config, name)


def _check_graph(config: pb.ModelConfig, name: str) -> None:
    sources: dict[str, list[str]] = {}
    """By tensor that a step gives: what that step takes."""
    consumed: set[str] = set()
    for index, step in enumerate(config.ensemble_scheduling.step):
        where = f"in step {index} of ensemble '{name}'"
        if not step.model_name:
            raise StructureError(f"must specify 'model_name' {where}")
        if not step.input_map:
            raise StructureError(f"must specify 'input_map' {where}")
        if not step.output_map:
            raise StructureError(f"must specify 'output_map' {where}")
        consumed.update(step.input_map.values())
        for tensor in step.output_map.values():
            if tensor in sources:
                raise StructureError(
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}' "
                    f"step {index}"
                )
            sources[tensor] = [value for _, value in sorted(step.input_map.items())]
    consumed.update(v.string_value for k, v in config.parameters.items() if k.startswith(CONDITION))
    inputs = [item.name for item in config.input]
    outputs = [item.name for item in config.output]
    for tensor in inputs:
        if tensor not in consumed:
            raise StructureError(f"ensemble input '{tensor}' for ensemble {name} is not used")
    written = _written(inputs, sources)
    for tensor in outputs:
        if tensor not in consumed and tensor not in sources:
            raise StructureError(f"ensemble output '{tensor}' for ensemble {name} is not used")
        if tensor not in written:
            raise StructureError(
                f"output '{tensor}' for ensemble '{name}' is not written{_cause(tensor, sources, written)}"
            )
    for tensor in sorted((consumed | sources.keys()) - set(outputs)):
        if tensor not in written or tensor not in consumed:
            raise StructureError(f"ensemble tensor '{tensor}' is unused in ensemble '{name}'")


def _written(inputs: Sequence[str], sources: Mapping[str, Sequence[str]]) -> set[str]:
    """The tensors of an ensemble that come to be, from its inputs on."""
    written = set(inputs)
    while found := [t for t, taken in sources.items() if t not in written and written.issuperset(taken)]:
        written.update(found)
    return written


def _cause(output: str, sources: Mapping[str, Sequence[str]], written: set[str]) -> str:
    """Names a tensor further up that an output which is not written waits for."""
    seen: set[str] = set()
    last = output
    while missing := [t for t in sources.get(last, ()) if t not in written and t not in seen]:
        last = missing[0]
        seen.add(last)
    return "" if last == output else f": at least one of its depending tensors, '{last}', is not connected"


def check_file_names(config: pb.ModelConfig) -> None:
    """Raise `InstanceError` for a model, warm-up or initial-state file outside its directory (C12).

    A configuration may come over the network (a load override), so a file name must not lead out of its directory.
    Links are checked where the file is opened (`executors.repository.files.contained`).
    """
    _check_inside(config.default_model_filename, "model file", config.name)
    for filename in config.cc_model_filenames.values():
        _check_inside(filename, "model file", config.name)
    for warmup in config.model_warmup:
        for tensor in warmup.inputs.values():
            _check_inside(tensor.input_data_file, "warmup file", config.name)
    for state in config.sequence_batching.state:
        for initial in state.initial_state:
            _check_inside(initial.data_file, "initial state file", config.name)


def _check_inside(filename: str, what: str, model_name: str) -> None:
    parts = filename.replace("\\", "/").split("/")
    if filename and (parts[0] == "" or ".." in parts or "\0" in filename):
        raise InstanceError(f"{what} path '{filename}' in model '{model_name}' is outside model directory")


def check_warmups(config: pb.ModelConfig) -> None:
    """Raise `InstanceError` for a warm-up request that does not fit the model (C17)."""
    inputs = {item.name: item for item in config.input}
    for warmup in config.model_warmup:
        subject = f"model warmup '{warmup.name}' of model '{config.name}'"
        if max(1, warmup.batch_size) > max(1, config.max_batch_size):
            raise InstanceError(
                f"{subject} has batch size {warmup.batch_size}, but the model's maximum is "
                f"{max(1, config.max_batch_size)}"
            )
        for name, tensor in sorted(warmup.inputs.items()):
            known = inputs.get(name)
            if known is None:
                raise InstanceError(f"{_UNKNOWN_ID}unexpected inference input '{name}' for model '{config.name}'")
            _check_warmup_tensor(tensor, known, name, config)
        _check_warmup_names(config, inputs, warmup)


def _check_warmup_names(config: pb.ModelConfig, inputs: Mapping[str, pb.ModelInput], warmup: pb.ModelWarmup) -> None:
    """Triton sends a warm-up through the checks of requests, whose texts these are."""
    required = [name for name, item in inputs.items() if not item.optional]
    missing = sorted(name for name in required if name not in warmup.inputs)
    if not missing:
        return
    expected = (
        f"expected {len(inputs)} inputs"
        if len(required) == len(inputs)
        else f"expected number of inputs between {len(required)} and {len(inputs)}"
    )
    raise InstanceError(
        f"{_UNKNOWN_ID}{expected} but got {len(warmup.inputs)} inputs for model '{config.name}'. Got input(s) "
        f"[{_quoted(sorted(warmup.inputs))}], but missing required input(s) [{_quoted(missing)}]. Please provide all "
        "required input(s)."
    )


def _quoted(names: Iterable[str]) -> str:
    return ",".join(f"'{name}'" for name in names)


def _check_warmup_tensor(tensor: pb.ModelWarmup.Input, known: pb.ModelInput, name: str, config: pb.ModelConfig) -> None:
    if any(dim < 1 for dim in tensor.dims):
        raise InstanceError(f"warmup setting expects all variable-size dimensions are specified for input '{name}'")
    if tensor.WhichOneof("input_data_type") is None:
        raise InstanceError(f"{_UNKNOWN_ID}warmup setting expects input '{name}' to have input_data_type set")
    if tensor.data_type != known.data_type:
        raise InstanceError(
            f"{_UNKNOWN_ID}inference input '{name}' data-type is '{_wire_name(tensor.data_type)}', but model "
            f"'{config.name}' expects '{_wire_name(known.data_type)}'"
        )
    fits = len(tensor.dims) == len(known.dims) and all(
        want in (-1, have) for have, want in zip(tensor.dims, known.dims, strict=True)
    )
    if not fits:
        batch = config.max_batch_size > 0
        expected, got = ([-1] * batch + [*known.dims], [1] * batch + [*tensor.dims])
        raise InstanceError(
            f"{_UNKNOWN_ID}unexpected shape for input '{name}' for model '{config.name}'. Expected "
            f"{_shape(expected)}, got {_shape(got)}. "
        )


def _shape(dims: Iterable[int]) -> str:
    return f"[{','.join(map(str, dims))}]"


def _wire_name(number: int) -> str:
    name = {value: name for name, value in pb.DataType.items()}.get(number, str(number)).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def unsupported_features(config: pb.ModelConfig) -> list[str]:
    """Return one sentence for each unsupported feature that the configuration uses; empty when there is none.

    These are rejected at load time. Fields without visible effect are accepted: scheduling hints, CUDA graphs and
    copies through pinned memory change no answer, order or limit. `check_tensors` and `check_instance_groups` raise the
    documented errors for shape tensors and profiles outside TensorRT.
    """
    used = list(_features(config))
    supported = declared_by(config.backend).supports if used else frozenset()
    return [f"{what} is not supported yet" for feature, what in used if feature not in supported]


def _features(config: pb.ModelConfig) -> Iterator[tuple[Feature | None, str]]:
    """What a configuration uses of the parts that few backends support; None for what none does."""
    if config.platform == _TENSORRT:
        tensors: list[pb.ModelInput | pb.ModelOutput] = [*config.input, *config.output]
        for tensor in tensors:
            if tensor.is_shape_tensor:
                yield "shape_tensors", f"'is_shape_tensor' (tensor '{tensor.name}')"
            if tensor.is_non_linear_format_io:
                yield "non_linear_formats", f"'is_non_linear_format_io' (tensor '{tensor.name}')"
    for index, group in enumerate(config.instance_group):
        name = group.name or f"{config.name}_{index}"  # as it is completed later
        if group.secondary_devices:
            yield "secondary_devices", f"'secondary_devices' (instance group '{name}')"
        if group.profile and config.platform == _TENSORRT:
            yield "profiles", f"'profile' (instance group '{name}')"
    accelerators = config.optimization.execution_accelerators
    for item in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator):
        yield "execution_accelerators", f"the execution accelerator '{item.name}'"
    if config.model_operations.op_library_filename:
        backend = config.backend or config.platform
        yield "op_libraries", f"'model_operations.op_library_filename' of the backend '{backend}'"
    if config.cc_model_filenames and any(
        group.kind == pb.ModelInstanceGroup.KIND_GPU for group in config.instance_group
    ):
        yield "cc_model_filenames", "'cc_model_filenames' of a GPU instance"
    if "TRITON_BATCH_STRATEGY_PATH" in config.parameters:
        yield None, "custom batching by a C++ library ('TRITON_BATCH_STRATEGY_PATH'; see 'charonia.batch_strategy')"
    # the second names the backend's usual form, the third a python-based backend (P20)
    if config.runtime not in ("", f"libtriton_{config.backend}.so", "model.py"):
        yield None, f"the runtime '{config.runtime}'"
