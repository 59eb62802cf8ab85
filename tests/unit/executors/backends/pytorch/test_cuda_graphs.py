"""Which models of PyTorch get CUDA graphs, and for which shapes. Without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from charonia.backend import InstanceSpec, ModelSource
from charonia.errors import CharoniaError
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from executors.backends.pytorch.cuda_graphs import wanted_graphs
from executors.backends.pytorch.model_archives import Form
from executors.backends.pytorch.torch_settings import COMPILE, TorchSettings
from executors.configuration.config import normalise

TENSORS = 'input { name: "x" data_type: TYPE_FP32 dims: [4, 5] } output { name: "y" data_type: TYPE_FP32 dims: 1 }'


def of(text: str, *, tensors: str = TENSORS, kind: str = "GPU", rows: int = 4) -> InstanceSpec:
    words = f'name: "m" backend: "pytorch" max_batch_size: {rows} {tensors} optimization {{ cuda {{ {text} }} }}'
    source = ModelSource("m", 1, Path("m"), normalise(parse(words)))
    return InstanceSpec("m_0", kind, 0, source, ModelInterface.of(source.config))


def wanted(spec: InstanceSpec, form: Form = Form.SCRIPT) -> list[tuple[int, ...]]:
    return [shapes.dims["x"] for shapes in wanted_graphs(spec, form, TorchSettings.of(spec, form))]


def test_the_usual_batches_have_graphs() -> None:
    assert wanted(of("graphs: true")) == [(1, 4, 5), (2, 4, 5), (3, 4, 5), (4, 4, 5)]
    assert wanted(of("graphs: true", rows=0)) == [(4, 5)]
    assert wanted(of("graphs: false")) == []


def test_open_dims_are_those_of_graph_specs() -> None:
    tensors = TENSORS.replace("[4, 5]", "[-1, 5]")
    spec = 'graph_spec { batch_size: 2 input { key: "x" value { dim: [7, 5] } } }'
    assert wanted(of(f"graphs: true {spec}", tensors=tensors)) == [(2, 7, 5)]


@pytest.mark.parametrize(
    ("text", "tensors", "sentence"),
    [
        ("", TENSORS.replace("[4, 5]", "[-1, 5]"), "a CUDA graph is of fixed shapes, and input 'x' is [-1,5]"),
        ("", TENSORS.replace("TYPE_FP32 dims: [4", "TYPE_STRING dims: [4"), "input 'x' holds strings or is ragged"),
        (
            'graph_spec { batch_size: 2 input { key: "x" value { dim: [4, 6] } } }',
            TENSORS,
            "does not fit its inputs: input 'x' is [1,4,5], not [2,4,6]",
        ),
        ("graph_spec { batch_size: 2 }", TENSORS.replace("[4, 5]", "[-1, 5]"), "input 'x' is [1,-1,5], not [2,-1,5]"),
        (
            'graph_spec { batch_size: 4 input { key: "x" value { dim: [7, 5] } } '
            'graph_lower_bound { batch_size: 2 input { key: "x" value { dim: [6, 5] } } } }',
            TENSORS.replace("[4, 5]", "[-1, 5]"),
            "padded with rows alone, its lower bound of input 'x' has to be [4,7,5] but for them",
        ),
    ],
)
def test_what_no_graph_can_be_made_of_is_refused(text: str, tensors: str, sentence: str) -> None:
    with pytest.raises(CharoniaError) as caught:
        wanted(of(f"graphs: true {text}", tensors=tensors))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "form", "compiled", "words"),
    [
        ("CPU", Form.SCRIPT, False, "instances that are on no GPU of their own"),
        ("GPU", Form.PACKAGE, False, "an AOTInductor package"),
        ("GPU", Form.CODE, True, f"what '{COMPILE}' compiles, which has a mode of its own for it"),
    ],
)
def test_graphs_that_change_nothing_are_logged(
    kind: str, form: Form, compiled: bool, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = f'parameters {{ key: "{COMPILE}" value {{ string_value: "{{}}" }} }} model_warmup {{ name: "w" }}'
    spec = of("graphs: true", kind=kind, tensors=TENSORS + (said if compiled else ""))
    assert wanted(spec, form) == []
    assert [record.getMessage() for record in caplog.records] == [
        f"model 'm': 'optimization.cuda.graphs' changes nothing for {words}"
    ]
