"""What callers write about delivery is either understood or refused, whatever it is."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from charonia.errors import InvalidArgument
from charonia.inference import MAX_DEADLINE_NS
from gateway.requests.preferences import HEADERS, MAX_WAIT_S, PARAMETERS, Wish, read_wish, words_of_headers

NOW_NS = 1_700_000_000_000_000_000
SENSIBLE = st.sampled_from(["respond-async", "wait=5", "cancel", "keep", "failed,expired", "http://x", "60", "fsync"])
VALUES = st.one_of(SENSIBLE, st.text(max_size=40), st.integers(), st.booleans(), st.floats())


def check(wish: Wish) -> None:
    options = wish.options
    assert 0 <= wish.wait_s <= MAX_WAIT_S
    assert wish.deadline_ns == 0 or NOW_NS <= wish.deadline_ns <= MAX_DEADLINE_NS
    assert options.retention_s >= 0
    assert options.respond_async == bool(wish.applied)
    assert options.respond_async or not wish.wait_s
    assert options.on_disconnect in ("", "cancel", "keep")
    wish.applied.encode("ascii")


@given(st.dictionaries(st.sampled_from(sorted(PARAMETERS)), VALUES))
def test_parameters(words: dict[str, str | int | bool | float]) -> None:
    with contextlib.suppress(InvalidArgument):
        check(read_wish(words, NOW_NS, form={}))


@given(
    st.lists(
        st.tuples(
            st.one_of(st.sampled_from(sorted(HEADERS)), st.binary(max_size=20)),
            st.one_of(SENSIBLE.map(str.encode), st.binary(max_size=40)),
        )
    )
)
def test_headers(headers: list[tuple[bytes, bytes]]) -> None:
    try:
        words = words_of_headers(headers)
    except InvalidArgument as error:
        assert error.message.endswith(" is given twice")
        return
    assert set(words) == {HEADERS[name] for name, _ in headers if name in HEADERS}
    with contextlib.suppress(InvalidArgument):
        check(read_wish(words, NOW_NS, form={}))


@given(st.lists(st.sampled_from(["respond-async", "wait=3", "handling=strict", "x;y=z", ""]), min_size=1))
def test_a_repeated_header_is_one_list(values: list[str]) -> None:
    together = words_of_headers([(b"prefer", ", ".join(values).encode())])
    apart = words_of_headers([(b"prefer", value.encode()) for value in values])
    assert read_wish(together, NOW_NS, form={}) == read_wish(apart, NOW_NS, form={})
