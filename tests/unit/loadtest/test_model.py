"""Addresses and shapes are resolved or refused with a sentence."""

from __future__ import annotations

import pytest

from loadtest.model import LoadTestError, Model, TensorSpec, resolve_shapes, split_url


def _model(*shapes: tuple[int, ...]) -> Model:
    inputs = tuple(TensorSpec(f"IN{index}", "FP32", shape) for index, shape in enumerate(shapes))
    return Model("m", "", inputs, ("OUT",))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("localhost:9", ("localhost", 9)),
        ("localhost", ("localhost", 8000)),
        ("http://10.0.0.1:80/", ("10.0.0.1", 80)),
        ("[::1]:7", ("::1", 7)),
        ("[::1]", ("::1", 8000)),
    ],
)
def test_urls(url: str, expected: tuple[str, int]) -> None:
    assert split_url(url, 8000) == expected


@pytest.mark.parametrize("url", ["https://h:1", "h:port", ":8000"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(LoadTestError):
        split_url(url, 8000)


@pytest.mark.parametrize(
    ("shape", "batch", "given", "expected"),
    [
        ((-1, 16), None, {}, (1, 16)),
        ((-1, 16), 4, {}, (4, 16)),
        ((-1, -1), 4, {"": (7,)}, (4, 7)),
        ((-1, -1), None, {"IN0": (3, 7)}, (3, 7)),
        ((3, 5), None, {}, (3, 5)),
    ],
)
def test_shapes(
    shape: tuple[int, ...], batch: int | None, given: dict[str, tuple[int, ...]], expected: tuple[int, ...]
) -> None:
    assert resolve_shapes(_model(shape), batch, given).inputs[0].shape == expected


@pytest.mark.parametrize(
    ("shapes", "batch", "given", "text"),
    [
        ([(-1, -1)], None, {}, "give --shape"),
        ([(-1, 16)], None, {"": (1, 15)}, "does not fit"),
        ([(-1, 16)], None, {"X": (1, 16)}, "unknown input 'X'"),
        ([(-1, 16), (-1, 16)], None, {"": (1, 16)}, "needs NAME:dims"),
        ([(3, 5)], 2, {}, "--batch 2 does not fit"),
    ],
)
def test_shapes_that_do_not_fit(
    shapes: list[tuple[int, ...]], batch: int | None, given: dict[str, tuple[int, ...]], text: str
) -> None:
    with pytest.raises(LoadTestError, match=text):
        resolve_shapes(_model(*shapes), batch, given)
