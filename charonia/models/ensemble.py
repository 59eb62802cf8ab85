"""The step graph of an ensemble, read from its configuration: the tensors that each step takes and gives. Pure.

`validation` checks the `ensemble_scheduling` block by itself (C51); this module checks it against the composing models
(C52, C53). `batcher.scheduling.ensembles.ensemble_planner` decides when a step runs.
A decoupled step begins a *scope*: steps that take its outputs run once for each of its responses (S54). Scopes have the
number of the step that begins them; `ROOT` is the request itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.tensors import shape_text
from protos.model_config_pb2 import ModelConfig, ModelEnsembling

from .interface import ModelInterface, TensorSpec
from .names import model_key

ENSEMBLE_SCHEDULING = "ensemble_scheduling"
CONDITION = "charonia.step_condition."
"""`charonia.step_condition.<step or model>` names the BOOL tensor that decides whether a step runs."""
ROOT = -1
Find = Callable[[str, int], ModelInterface]
"""The interface of a composing model by key and version (-1: the highest)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `inputs` and `outputs` map the model's tensors to the ensemble's; `optional` inputs may be missing.

    `model` is its key. `condition` is the ensemble tensor that decides whether it runs, "" for none. `scope`
    determines how often it runs. `dims` are those of the model's inputs, without the batch dimension that they have if
    it is `batching`.
    """

    index: int
    model: str
    version: int
    inputs: dict[str, str]
    outputs: dict[str, str]
    condition: str = ""
    optional: frozenset[str] = frozenset()
    decoupled: bool = False
    scope: int = ROOT
    batching: bool = False
    dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EnsembleGraph:
    """The steps of an ensemble with its inputs and outputs. `scopes` has the scope of each tensor.

    `dims` are those of its outputs as its steps make them, without the batch dimension that they have if it is
    `batching`. `reshaped` are its inputs and outputs with a `reshape`, which steps do not see.
    """

    name: str
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scopes: dict[str, int] = field(default_factory=dict)
    max_inflight_requests: int = 0
    batching: bool = False
    dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    reshaped: Mapping[str, TensorSpec] = field(default_factory=dict)

    @property
    def decoupled(self) -> bool:
        """Whether it may answer several times (C53)."""
        return any(step.decoupled for step in self.steps)

    def chain(self, scope: int) -> tuple[int, ...]:
        """The scopes that contain `scope`, itself included, outermost first; empty for the request."""
        found: list[int] = []
        while scope != ROOT:
            found.append(scope)
            scope = self.steps[scope].scope
        return tuple(reversed(found))


def composing_models(config: ModelConfig) -> dict[str, set[int]]:
    """The keys of the models an ensemble is composed of, each with the versions its steps name (-1: the highest)."""
    found: dict[str, set[int]] = {}
    for step in config.ensemble_scheduling.step:
        found.setdefault(_key(step), set()).add(version_of(step.model_version))
    return found


def _key(step: ModelEnsembling.Step) -> str:
    return model_key(step.model_namespace, step.model_name)


def version_of(number: int) -> int:
    """The version of a step; the highest if it is not set (C50)."""
    return number if number > 0 else -1


def conditions(config: ModelConfig) -> dict[int, str]:
    """The tensor that decides on each conditional step, by the step's index. Raises `InvalidArgument`.

    `parameters { key: "charonia.step_condition.<step or model>" value { string_value: "<tensor>" } }`: the steps with
    that index, or of that model, run only when the BOOL tensor has a true element.
    """
    steps = config.ensemble_scheduling.step
    found: dict[int, str] = {}
    for key, value in sorted(config.parameters.items()):
        if not key.startswith(CONDITION):
            continue
        which = key.removeprefix(CONDITION)
        chosen = [i for i, step in enumerate(steps) if which == str(i)] or [
            i for i, step in enumerate(steps) if which == step.model_name
        ]
        if not chosen:
            raise InvalidArgument(f"in ensemble {config.name}, parameter '{key}' names no step and no model of a step")
        for index in chosen:
            if index in found:
                raise InvalidArgument(f"in ensemble {config.name}, step {index} has more than one condition")
            found[index] = value.string_value
    return found


def compose(config: ModelConfig, find: Find) -> EnsembleGraph:
    """The graph of an ensemble whose composing models are known. Raises `InvalidArgument` with C52's texts.

    Errors of `find` are passed on.
    """
    name = config.name
    models = [find(_key(step), version_of(step.model_version)) for step in config.ensemble_scheduling.step]
    known = _check_tensors(config, models)
    deciding = conditions(config)
    steps: list[Step] = []
    for index, (written, interface) in enumerate(zip(config.ensemble_scheduling.step, models, strict=True)):
        steps.append(
            Step(
                index,
                _key(written),
                version_of(written.model_version),
                dict(sorted(written.input_map.items())),
                dict(sorted(written.output_map.items())),
                deciding.get(index, ""),
                frozenset(interface.inputs) - interface.required_inputs,
                interface.decoupled,
                batching=interface.batching,
                dims={spec.name: spec.dims for spec in interface.inputs.values()},
            )
        )
    placed, scopes = _scoped(name, steps, [item.name for item in config.input], known)
    own = ModelInterface.of(config)
    outputs = tuple(own.outputs)
    _one_origin(name, name, {scopes[output] for output in outputs})
    return EnsembleGraph(
        name,
        placed,
        tuple(item.name for item in config.input),
        outputs,
        scopes,
        config.ensemble_scheduling.max_inflight_requests,
        config.max_batch_size > 0,
        {name: spec.backend_dims for name, spec in own.outputs.items()},
        {name: spec for name, spec in (own.inputs | own.outputs).items() if spec.reshape is not None},
    )


def _one_origin(ensemble: str, model: str, scopes: set[int]) -> int:
    """The scope of a step that takes these tensors. `model` is the one that Triton names, see `_Node`."""
    origins = scopes - {ROOT}
    if len(origins) > 1:
        raise InvalidArgument(
            f"in ensemble {ensemble}, step of model '{model}' receives inputs originated from different decoupled "
            "models"
        )
    return origins.pop() if origins else ROOT


def _scoped(
    name: str, steps: Sequence[Step], inputs: Sequence[str], known: Mapping[str, _Node]
) -> tuple[tuple[Step, ...], dict[str, int]]:
    """The steps with their scopes, and the scope of each tensor, found from the inputs on."""
    scopes = dict.fromkeys(inputs, ROOT)
    placed: dict[int, Step] = {}
    while len(placed) < len(steps):
        ready = [s for s in steps if s.index not in placed and all(tensor in scopes for tensor in needs(s))]
        if not ready:
            left = ", ".join(str(s.index) for s in steps if s.index not in placed)
            raise InvalidArgument(f"in ensemble '{name}', steps {left} wait for each other's outputs")
        for step in ready:
            first = next(iter(step.outputs.values()))
            scope = _one_origin(name, known[first].model, {scopes[tensor] for tensor in needs(step)})
            placed[step.index] = replace(step, scope=scope)
            for tensor in step.outputs.values():
                scopes[tensor] = step.index if step.decoupled else scope
    return tuple(placed[index] for index in range(len(steps))), scopes


def needs(step: Step) -> set[str]:
    """The ensemble tensors a step waits for."""
    wanted = set(step.inputs.values())
    if step.condition:
        wanted.add(step.condition)
    return wanted


@dataclass(frozen=True, slots=True)
class _Node:
    """A model's view of an ensemble tensor: the first model that mentions it; the ensemble of its own tensors."""

    model: str
    batching: bool
    datatype: DataType
    dims: tuple[int, ...]

    @property
    def full_dims(self) -> tuple[int, ...]:
        return (-1, *self.dims) if self.batching else self.dims


def _check_tensors(config: ModelConfig, models: Sequence[ModelInterface]) -> dict[str, _Node]:
    name = config.name
    own = ModelInterface.of(config)
    known = {
        spec.name: _Node(name, own.batching, spec.datatype, spec.backend_dims)
        for spec in (*own.inputs.values(), *own.outputs.values())
    }
    for written, interface in zip(config.ensemble_scheduling.step, models, strict=True):
        if interface.batching and interface.max_batch_size < own.max_batch_size:
            raise InvalidArgument(
                f"ensemble {name} allows maximum batch size {own.max_batch_size}, but it contains model "
                f"{written.model_name} which only allows maximum batch size to be {interface.max_batch_size}"
            )
        _check_inputs(name, written.model_name, dict(written.input_map), interface, known)
        for output, tensor in sorted(written.output_map.items()):
            spec = interface.outputs.get(output)
            if spec is None:
                raise InvalidArgument(
                    f"in ensemble {name}, ensemble tensor {tensor} is mapped from non-existing output {output} in "
                    f"model {written.model_name}"
                )
            _agree(name, tensor, _Node(written.model_name, interface.batching, spec.datatype, spec.dims), known)
    for index, tensor in conditions(config).items():
        node = known.get(tensor)
        if node is None:
            raise InvalidArgument(f"in ensemble {name}, the condition of step {index} is no tensor: '{tensor}'")
        if node.datatype is not DataType.BOOL:
            raise InvalidArgument(
                f"in ensemble {name}, the condition of step {index} must be a BOOL tensor, '{tensor}' is "
                f"{node.datatype.value}"
            )
    return known


def _check_inputs(
    ensemble: str, model: str, input_map: Mapping[str, str], interface: ModelInterface, known: dict[str, _Node]
) -> None:
    for mapped, tensor in sorted(input_map.items()):
        if mapped not in interface.inputs:
            raise InvalidArgument(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapping to non-existing input {mapped} in model "
                f"{model}"
            )
    for spec in interface.inputs.values():
        if spec.name in input_map:
            _agree(ensemble, input_map[spec.name], _Node(model, interface.batching, spec.datatype, spec.dims), known)
        elif not spec.optional:
            raise InvalidArgument(
                f"in ensemble {ensemble}, input {spec.name} in model {model} is not mapped to any ensemble tensors"
            )


def _agree(ensemble: str, tensor: str, node: _Node, known: dict[str, _Node]) -> None:
    """Two models may differ in variable dims, and in whether the dims include the batch dimension."""
    other = known.setdefault(tensor, node)
    where = f"in ensemble {ensemble}, ensemble tensor {tensor}: "
    if other.datatype is not node.datatype:
        raise InvalidArgument(
            f"{where}inconsistent data type: {other.datatype.config_name} is inferred from model {other.model} while "
            f"{node.datatype.config_name} is inferred from model {node.model}"
        )
    if not matches(other.dims, node.dims) and not matches(other.full_dims, node.full_dims):
        raise InvalidArgument(
            f"{where}inconsistent shape: {shape_text(other.full_dims)} is inferred from model {other.model} while "
            f"{shape_text(node.full_dims)} is inferred from model {node.model}"
        )


def fitted(shape: tuple[int, ...], rows: int, dims: Sequence[int], *, batching: bool) -> tuple[int, ...]:
    """The shape in which a model with these `dims`, `batching` or not, takes a tensor (S50).

    `rows` is the batch size of the request that the tensor was made for, 0 if the model that made it does not batch.
    The shape is unchanged if both models batch, or neither, and if it matches the dims as a whole, or a batch of more
    than one becomes an ordinary dimension.
    """
    fits = matches(shape, dims)
    if batching and not rows and fits:
        return (1, *shape)
    if not batching and rows == 1 and not fits:
        return shape[1:]
    return shape


def matches(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes may be equal, where -1 allows any size."""
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def circle(name: str, composed_of: Callable[[str], Sequence[str]]) -> tuple[str, ...]:
    """The ensembles from `name` back to itself, or to one on the way that is reached again; empty without a cycle.

    `composed_of` returns the models of an ensemble, nothing for any other model.
    """
    done: set[str] = set()

    def walk(at: str, path: tuple[str, ...]) -> tuple[str, ...]:
        if at in path:
            return (*path[path.index(at) :], at)
        if at in done:
            return ()
        done.add(at)
        for below in composed_of(at):
            found = walk(below, (*path, at))
            if found:
                return found
        return ()

    return walk(name, ())
