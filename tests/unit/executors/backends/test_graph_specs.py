"""Which shapes have CUDA graphs, and which graph a batch takes."""

from __future__ import annotations

import pytest

from charonia.models.config_errors import InstanceError
from charonia.models.config_forms import parse
from executors.backends.graph_specs import GraphShapes, TakenShapes, closest_graph, graph_shapes
from executors.backends.tensorrt.engine_tensors import Profile, Range

PROFILE = Profile(0, {"a": Range((1, 4), (4, 4), (8, 16))}, {})


def shapes(text: str) -> list[GraphShapes]:
    usual = {name: dims.usual for name, dims in PROFILE.dims.items()}
    return graph_shapes(
        parse(f"name: 'm' {text}"), TakenShapes(usual, lambda dims: PROFILE.refusal(dims, {}), "profile 0")
    )


def batches(text: str) -> list[tuple[int, ...]]:
    return [one.dims["a"] for one in shapes(text)]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("max_batch_size: 8", [1, 2, 3, 4, 6, 8]),
        ("max_batch_size: 8 dynamic_batching { preferred_batch_size: 5 }", [1, 5, 8]),
        ("max_batch_size: 8 sequence_batching { oldest { preferred_batch_size: 2 } }", [1, 2, 8]),
        ("max_batch_size: 7 dynamic_batching { }", [1, 7]),
    ],
)
def test_without_specs_the_usual_batches_have_graphs(text: str, rows: list[int]) -> None:
    assert batches(text) == [(count, 4) for count in rows]


def test_a_model_without_batching_has_one_graph_of_the_usual_dims() -> None:
    assert batches("max_batch_size: 0") == [(4, 4)]


def test_batches_that_the_profile_does_not_take_have_none() -> None:
    assert batches("max_batch_size: 16") == [(1, 4), (2, 4), (3, 4), (4, 4), (6, 4), (8, 4)]


SPEC = (
    "max_batch_size: 8 optimization { cuda { graphs: true graph_spec { batch_size: 4 "
    "input { key: 'a' value { dim: 16 } } graph_lower_bound { batch_size: 2 input { key: 'a' value { dim: 8 } } } } "
    "graph_spec { batch_size: 8 } } }"
)


def test_specs_are_taken_as_they_are_written() -> None:
    assert shapes(SPEC) == [
        GraphShapes({"a": (4, 16)}, {"a": (2, 8)}),
        GraphShapes({"a": (8, 4)}, {"a": (8, 4)}),
    ]


@pytest.mark.parametrize(
    ("found", "taken"),
    [((8, 4), (8, 4)), ((4, 16), (4, 16)), ((3, 9), (4, 16)), ((2, 7), None), ((1, 8), None), ((5, 16), None)],
)
def test_a_batch_takes_its_own_graph_or_one_that_it_may_be_padded_to(
    found: tuple[int, int], taken: tuple[int, int] | None
) -> None:
    graph = closest_graph(shapes(SPEC), {"a": found})
    assert (graph and graph.dims["a"]) == taken


def test_the_smallest_of_several_is_taken() -> None:
    graphs = [GraphShapes({"a": (n, 4)}, {"a": (1, 4)}) for n in (8, 4, 6)]
    graph = closest_graph(graphs, {"a": (3, 4)})
    assert graph is graphs[1]


def spec(text: str, most: int = 8) -> str:
    return f"max_batch_size: {most} optimization {{ cuda {{ graph_spec {{ {text} }} }} }}"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (spec("batch_size: 1", 0), "graph spec expects 'batch_size' to be 0 if 'max_batch_size' is 0"),
        (spec("batch_size: 9"), "graph spec expects 'batch_size' to be >= 1 and <= 8"),
        (
            spec("batch_size: 2 graph_lower_bound { batch_size: 3 }"),
            "graph lower bound spec expects 'batch_size' to be <= graph spec 'batch_size'",
        ),
        (
            spec("batch_size: 2 input { key: 'b' value { dim: 4 } }"),
            "graph spec of model 'm' has a shape for the unknown input 'b'",
        ),
        (
            spec("batch_size: 2 input { key: 'a' value { dim: 4 } } graph_lower_bound { batch_size: 1 }"),
            "graph lower bound spec expects shape for input 'a'",
        ),
        (
            spec(
                "batch_size: 2 input { key: 'a' value { dim: 4 } } "
                "graph_lower_bound { batch_size: 1 input { key: 'a' value { dim: 5 } } }"
            ),
            "graph lower bound spec expects input 'a' to have dimension <= 4",
        ),
        (
            spec("batch_size: 2 input { key: 'a' value { dim: 17 } }"),
            "graph spec of model 'm' does not fit profile 0: request specifies invalid shape for input 'a'. Error "
            "details: model expected the shape of dimension 1 to be between 4 and 16 but received 17",
        ),
    ],
)
def test_specs_that_make_no_sense_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(InstanceError) as caught:
        shapes(text)
    assert str(caught.value) == sentence
