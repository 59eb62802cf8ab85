"""Rendered options mean what they meant: how `serve` hands values to its parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from charonia.options.table import ANY, RANGES
from charonia.options.values import Option, options_of, parse, render

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def values_of(option: Option) -> st.SearchStrategy[object]:
    if option.repeat:
        return st.lists(TEXTS, min_size=1, max_size=3).map(tuple)
    if option.kind in ("bool", "flag"):
        return st.booleans()
    if option.kind == "int":
        least, most = RANGES.get(option.name, ANY)
        return st.integers(int(max(least, 1)), int(min(most, max(least, 64))))
    if option.kind == "float":
        return st.floats(1, 60)
    return TEXTS


@given(st.sampled_from(["gateway", "batcher", "executor", "webhooks", "serve"]), st.data())
def test_parse_undoes_render(role: str, data: st.DataObject) -> None:
    values = parse(role, [], {}, {})
    for option in data.draw(st.lists(st.sampled_from(options_of(role)), max_size=8)):
        values[option.key] = data.draw(values_of(option))
    assert parse(role, render(role, values), {}, {}) == values
