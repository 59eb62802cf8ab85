"""Calls of tools that a grammar forces, read from texts that come in any pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.openai.shapes.forced_calls import ForcedCalls, ToolCalls, ToolDelta, call_id

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.fixed_dictionaries({"name": st.text(min_size=1), "parameters": st.dictionaries(st.text(), JSON, max_size=3)}),
    min_size=1,
    max_size=3,
)


@settings(max_examples=examples(200), deadline=None)
@given(CALLS, st.booleans(), st.data())
def test_calls_are_the_same_however_the_text_is_cut(calls: list[Any], spaced: bool, data: st.DataObject) -> None:
    text = json.dumps(calls, indent=1 if spaced else None)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    reader, found = ForcedCalls(), ToolCalls()
    for begin, end in itertools.pairwise(cuts):
        for delta in reader.push(text[begin:end]):
            assert isinstance(delta, ToolDelta)
            found.add(delta)
    documents = found.documents("id", 0)
    assert [one["function"]["name"] for one in documents] == [call["name"] for call in calls]
    assert [json.loads(one["function"]["arguments"]) for one in documents] == [call["parameters"] for call in calls]
    assert [one["id"] for one in documents] == [call_id("id", 0, at) for at in range(len(calls))]
