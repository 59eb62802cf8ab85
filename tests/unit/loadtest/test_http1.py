"""The answer reader: every split of the bytes gives the same answer, and nonsense is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.http1 import Head, ProtocolError, ResponseReader, parse_head

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\ninference-header-content-length: 2\r\n\r\nabcde"
CHUNKED = b"HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"


def test_head_fields() -> None:
    assert parse_head(PLAIN[: PLAIN.index(b"\r\n\r\n")]) == Head(200, 5, 2, False)


def test_close_is_noticed() -> None:
    assert parse_head(b"HTTP/1.1 204 No Content\r\nconnection: Close\r\ncontent-length: 0").close
    assert parse_head(b"HTTP/1.0 200 OK\r\ncontent-length: 0").close


@pytest.mark.parametrize(("message", "status"), [(PLAIN, 200), (CHUNKED, 400)])
@given(cuts=st.lists(st.integers(0, len(CHUNKED)), max_size=6))
def test_any_split_gives_the_same_answer(message: bytes, status: int, cuts: list[int]) -> None:
    reader = ResponseReader()
    edges = [0, *sorted(min(cut, len(message)) for cut in cuts), len(message)]
    answers = [reader.feed(message[a:b]) for a, b in itertools.pairwise(edges) if b > a]
    assert answers[:-1] == [None] * (len(answers) - 1)
    assert answers[-1] is not None
    assert (answers[-1][0].status, answers[-1][1]) == (status, b"abcde")
    assert reader.idle


def test_answers_follow_one_another() -> None:
    reader = ResponseReader()
    for _ in range(3):
        answer = reader.feed(PLAIN)
        assert answer is not None
        assert answer[1] == b"abcde"


@pytest.mark.parametrize(
    "message",
    [
        b"ICY 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        PLAIN + b"x",
        CHUNKED.replace(b"3\r\n", b"z\r\n", 1),
        CHUNKED + b"x",
        b"H" * 70_000,
    ],
)
def test_nonsense_is_refused(message: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseReader().feed(message)
