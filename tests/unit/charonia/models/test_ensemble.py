"""What an ensemble may be composed of, and the graph that comes of it (C52, C53)."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from charonia.errors import CharoniaError, InvalidArgument
from charonia.models.ensemble import ROOT, circle, compose, composing_models, fitted
from charonia.models.interface import ModelInterface
from protos.model_config_pb2 import ModelConfig


def parse(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def model(text: str) -> ModelInterface:
    return ModelInterface.of(parse(text))


def tensor(name: str, type_: str = "TYPE_FP32", dims: str = "4", more: str = "") -> str:
    return f'{{ name: "{name}" data_type: {type_} dims: [ {dims} ] {more} }}'


def step(name: str, takes: dict[str, str], gives: dict[str, str], version: int = -1) -> str:
    taken = " ".join(f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in takes.items())
    given = " ".join(f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in gives.items())
    return f'step {{ model_name: "{name}" model_version: {version} {taken} {given} }}'


PLAIN = f'name: "plain" max_batch_size: 4 input [ {tensor("i")} ] output [ {tensor("o")} ]'
FLAG = f'name: "flag" max_batch_size: 4 input [ {tensor("i")} ] output [ {tensor("o", "TYPE_BOOL", "1")} ]'
MANY = PLAIN.replace('"plain"', '"many"') + " model_transaction_policy { decoupled: true }"
PAIR = (
    f'name: "pair" max_batch_size: 4 input [ {tensor("i")}, {tensor("j", more="optional: true")} ] '
    f"output [ {tensor('o')} ]"
)
WHOLE = f'name: "whole" input [ {tensor("i", dims="-1, 4")} ] output [ {tensor("o", dims="-1, 4")} ]'
MODELS = {interface.name: interface for interface in map(model, (PLAIN, FLAG, MANY, PAIR, WHOLE))}


def find(name: str, version: int) -> ModelInterface:
    return MODELS[name]


def ensemble(*steps: str, io: str = "", more: str = "", batch: int = 4) -> ModelConfig:
    io = io or f"input [ {tensor('x')} ] output [ {tensor('y')} ]"
    return parse(
        f'name: "e" platform: "ensemble" max_batch_size: {batch} {io} '
        f"ensemble_scheduling {{ {' '.join(steps)} }} {more}"
    )


def condition(which: str, name: str) -> str:
    return f'parameters {{ key: "charonia.step_condition.{which}" value {{ string_value: "{name}" }} }}'


def test_a_graph_knows_what_is_optional_and_what_decides() -> None:
    graph = compose(
        ensemble(
            step("flag", {"i": "x"}, {"o": "go"}),
            step("pair", {"i": "x", "j": "x"}, {"o": "y"}, version=3),
            more=condition("pair", "go"),
        ),
        find,
    )
    assert [(s.model, s.version, s.condition, s.optional, s.scope) for s in graph.steps] == [
        ("flag", -1, "", frozenset(), ROOT),
        ("pair", 3, "go", frozenset({"j"}), ROOT),
    ]
    assert not graph.decoupled
    assert composing_models(ensemble(step("pair", {"i": "x"}, {"o": "y"}, version=3))) == {"pair": {3}}


def test_what_follows_a_decoupled_step_runs_for_each_of_its_responses() -> None:
    graph = compose(
        ensemble(
            step("plain", {"i": "b"}, {"o": "c"}),
            step("many", {"i": "x"}, {"o": "b"}),
            step("many", {"i": "c"}, {"o": "d"}),
            step("pair", {"i": "d", "j": "x"}, {"o": "y"}),
        ),
        find,
    )
    assert graph.decoupled
    assert [s.scope for s in graph.steps] == [1, ROOT, 1, 2]
    assert graph.chain(graph.scopes["y"]) == (1, 2)
    assert graph.chain(graph.scopes["x"]) == ()


def test_a_batch_dimension_may_be_counted_among_the_dims() -> None:
    compose(ensemble(step("plain", {"i": "x"}, {"o": "y"}), io=whole_io(), batch=0), find)
    compose(
        ensemble(step("whole", {"i": "x"}, {"o": "m"}), step("plain", {"i": "m"}, {"o": "y"}), io=whole_io(), batch=0),
        find,
    )


@pytest.mark.parametrize(
    ("shape", "rows", "dims", "batching", "expected"),
    [
        ((4,), 0, (4,), True, (1, 4)),
        ((4,), 0, (-1,), True, (1, 4)),
        ((2, 4), 0, (4,), True, (2, 4)),  # a model that does not batch may count the batch dimension itself
        ((1, 4), 1, (4,), False, (4,)),
        ((2, 4), 2, (4,), False, (2, 4)),
        ((1, 4), 1, (-1, 4), False, (1, 4)),
        ((1, 4), 1, (4,), True, (1, 4)),
        ((4,), 0, (5,), False, (4,)),
    ],
)
def test_a_tensor_between_a_model_that_batches_and_one_that_does_not(
    shape: tuple[int, ...], rows: int, dims: tuple[int, ...], batching: bool, expected: tuple[int, ...]
) -> None:
    assert fitted(shape, rows, dims, batching=batching) == expected


def test_a_batching_ensemble_may_contain_a_model_that_does_not_batch() -> None:
    graph = compose(ensemble(step("whole", {"i": "x"}, {"o": "y"})), find)
    assert (graph.batching, graph.dims, graph.steps[0].batching, graph.steps[0].dims) == (
        *(True, {"y": (4,)}),
        *(False, {"i": (-1, 4)}),
    )


def whole_io() -> str:
    return f"input [ {tensor('x', dims='-1, 4')} ] output [ {tensor('y', dims='-1, 4')} ]"


LAST = step("plain", {"i": "x"}, {"o": "y"})
BAD = [
    (
        ensemble(step("plain", {"k": "x"}, {"o": "y"})),
        "in ensemble e, ensemble tensor x is mapping to non-existing input k in model plain",
    ),
    (
        ensemble(step("pair", {"j": "x"}, {"o": "y"})),
        "in ensemble e, input i in model pair is not mapped to any ensemble tensors",
    ),
    (
        ensemble(step("plain", {"i": "x"}, {"p": "y"})),
        "in ensemble e, ensemble tensor y is mapped from non-existing output p in model plain",
    ),
    (
        ensemble(step("flag", {"i": "x"}, {"o": "y"})),
        "in ensemble e, ensemble tensor y: inconsistent data type: TYPE_FP32 is inferred from model e while TYPE_BOOL "
        "is inferred from model flag",
    ),
    (
        ensemble(LAST, io=f"input [ {tensor('x', dims='5')} ] output [ {tensor('y')} ]"),
        "in ensemble e, ensemble tensor x: inconsistent shape: [-1,5] is inferred from model e while [-1,4] is "
        "inferred from model plain",
    ),
    (
        ensemble(LAST, batch=8),
        "ensemble e allows maximum batch size 8, but it contains model plain which only allows maximum batch size to "
        "be 4",
    ),
    (
        ensemble(
            step("many", {"i": "x"}, {"o": "a"}),
            step("many", {"i": "x"}, {"o": "b"}),
            step("pair", {"i": "a", "j": "b"}, {"o": "y"}),
        ),
        "in ensemble e, step of model 'e' receives inputs originated from different decoupled models",
    ),
    (
        ensemble(
            step("many", {"i": "x"}, {"o": "a"}),
            step("many", {"i": "x"}, {"o": "b"}),
            step("pair", {"i": "a", "j": "b"}, {"o": "c"}),
            step("plain", {"i": "c"}, {"o": "y"}),
        ),
        "in ensemble e, step of model 'pair' receives inputs originated from different decoupled models",
    ),
    (
        ensemble(step("plain", {"i": "b"}, {"o": "a"}), step("pair", {"i": "a", "j": "x"}, {"o": "b"}), LAST),
        "in ensemble 'e', steps 0, 1 wait for each other's outputs",
    ),
    (
        ensemble(LAST, more=condition("plain", "x")),
        "in ensemble e, the condition of step 0 must be a BOOL tensor, 'x' is FP32",
    ),
    (ensemble(LAST, more=condition("0", "z")), "in ensemble e, the condition of step 0 is no tensor: 'z'"),
    (
        ensemble(LAST, more=condition("7", "x")),
        "in ensemble e, parameter 'charonia.step_condition.7' names no step and no model of a step",
    ),
    (
        ensemble(step("flag", {"i": "x"}, {"o": "go"}), LAST, more=condition("1", "go") + condition("plain", "go")),
        "in ensemble e, step 1 has more than one condition",
    ),
    (
        ensemble(
            step("many", {"i": "x"}, {"o": "y"}),
            step("many", {"i": "x"}, {"o": "z"}),
            io=f"input [ {tensor('x')} ] output [ {tensor('y')}, {tensor('z')} ]",
        ),
        "in ensemble e, step of model 'e' receives inputs originated from different decoupled models",
    ),
]


@pytest.mark.parametrize(("config", "text"), BAD, ids=[text[-40:] for _, text in BAD])
def test_what_does_not_fit_is_refused(config: ModelConfig, text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        compose(config, find)
    assert refused.value.message == text


def test_what_cannot_be_found_is_told_by_who_looks() -> None:
    def nothing(name: str, version: int) -> ModelInterface:
        raise CharoniaError(f"no {name} {version}")

    with pytest.raises(CharoniaError, match="no plain -1"):
        compose(ensemble(LAST), nothing)


@pytest.mark.parametrize(
    ("composed", "found"),
    [
        ({"a": ["b", "c"], "b": ["c"]}, ()),
        ({"a": ["a"]}, ("a", "a")),
        ({"a": ["b"], "b": ["c"], "c": ["a"]}, ("a", "b", "c", "a")),
        ({"a": ["x", "b"], "b": ["c"], "c": ["b"]}, ("b", "c", "b")),
    ],
)
def test_a_circle_is_found(composed: dict[str, list[str]], found: tuple[str, ...]) -> None:
    assert circle("a", lambda name: composed.get(name, [])) == found
