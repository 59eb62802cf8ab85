"""Which signature of a `saved_model.pb` is served, and the file that OpenVINO gets for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow_model as tf

from charonia.errors import InternalError, InvalidArgument
from executors.backends.openvino.tensorflow_files import choose_signature

BOTH = {"serving_default": tf.SERVING, "add": tf.ADDING}


def written(directory: Path, signatures: Any, tags: Any = (("serve",),)) -> bytes:
    tf.saved_model(directory, signatures, tags)
    return (directory / "saved_model.pb").read_bytes()


def test_the_usual_signature_needs_no_other_file(tmp_path: Path) -> None:
    chosen = choose_signature("m", written(tmp_path, BOTH), None, None)
    assert (chosen.inputs, chosen.outputs, chosen.file) == (("picture",), ("scores", "raw"), None)


def test_the_graph_with_the_tag_alone_comes_first(tmp_path: Path) -> None:
    content = written(tmp_path, BOTH, (("serve", "gpu"), ("serve",), ("fast", "serve")))
    graphs = {tag: choose_signature("m", content, tag, "add").file or b"" for tag in ("serve", "gpu", "fast")}
    for tag, other in (("serve", "gpu"), ("gpu", "fast"), ("fast", "gpu")):
        with pytest.raises(InvalidArgument, match=f"expected '{other}' tag"):
            choose_signature("m", graphs[tag], other, None)


@pytest.mark.parametrize(
    ("signatures", "tags", "tag", "signature"),
    [
        (BOTH, (("serve",),), None, "add"),
        ({"add": tf.ADDING}, (("serve",),), None, None),
        ({"__saved_model_init_op": ({}, {}), "add": tf.ADDING}, (("serve",),), None, None),
        ({"add": tf.ADDING}, (("train",), ("serve", "fast")), "fast", "add"),
    ],
)
def test_another_becomes_the_only_one(
    tmp_path: Path, signatures: Any, tags: Any, tag: str | None, signature: str | None
) -> None:
    chosen = choose_signature("m", written(tmp_path, signatures, tags), tag, signature)
    assert (chosen.inputs, chosen.outputs) == (("left", "right"), ("sum", "echo"))
    assert chosen.file is not None
    again = choose_signature("m", chosen.file, tag, None)
    assert (again.inputs, again.outputs, again.file) == (chosen.inputs, chosen.outputs, None)


def test_the_graph_is_handed_on_as_it_is(tmp_path: Path) -> None:
    chosen = choose_signature("m", written(tmp_path, BOTH), None, "add")
    assert chosen.file is not None
    assert tf.WEIGHTS.tobytes() in chosen.file


@pytest.mark.parametrize(
    ("tag", "signature", "text"),
    [
        (None, "other", "expected 'other' signature; the file has 'add', 'serving_default'"),
        ("gpu", None, "expected 'gpu' tag; the graphs of the file have 'serve'"),
    ],
)
def test_what_the_file_has_not(tmp_path: Path, tag: str | None, signature: str | None, text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^unable to load model 'm', {text}$"):
        choose_signature("m", written(tmp_path, BOTH), tag, signature)


def test_a_file_without_graphs_or_signatures(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="expected 'serve' tag; the graphs of the file have none"):
        choose_signature("m", b"", None, None)
    with pytest.raises(InvalidArgument, match="expected 'serving_default' signature; the file has none"):
        choose_signature("m", written(tmp_path, {}), None, None)
    with pytest.raises(InternalError, match=r"the file 'saved_model.pb' of 'm' is no SavedModel"):
        choose_signature("m", b"\xff" * 20, None, None)
