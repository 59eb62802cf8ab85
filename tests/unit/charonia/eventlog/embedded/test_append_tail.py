"""Which ends of an append-only file are an unfinished write, at every byte a file can be cut at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.eventlog.embedded.append_tail import unfinished


def command(*arguments: bytes) -> bytes:
    return b"*%d\r\n" % len(arguments) + b"".join(b"$%d\r\n%s\r\n" % (len(each), each) for each in arguments)


WRITE = command(b"XADD", b"q:{m}:0:0", b"1-0", b"r", b"\x00*1\r\n$4\r\nEXEC\r\n")


def test_every_beginning_of_a_write_is_an_unfinished_one() -> None:
    for cut in range(1, len(WRITE)):
        found = unfinished(WRITE[:cut], 0)
        assert found is not None, cut
        assert found in ([], [found[0] if found else ""]), cut
        assert not found or "XADD q:{m}:0:0 (unfinished)".startswith(found[0].removesuffix(" (unfinished)").strip()), (
            cut
        )


def test_the_writes_of_a_transaction_without_its_end_are_named() -> None:
    content = command(b"MULTI") + WRITE + command(b"HSET", b"u:{m}", b"a", b"b")[:-3]
    assert unfinished(content, 0) == ["MULTI", "XADD q:{m}:0:0", "HSET u:{m} (unfinished)"]


@given(cut=st.integers(min_value=0, max_value=len(WRITE)), zeros=st.integers(min_value=1, max_value=5000))
def test_zeros_after_an_unfinished_write_belong_to_it(cut: int, zeros: int) -> None:
    assert unfinished(WRITE[:cut] + bytes(zeros), 0) is not None


def test_remarks_of_the_server_are_skipped() -> None:
    assert unfinished(b"#TS:1700000000\r\n" + WRITE[:16], 0) == ["XADD (unfinished)"]


@pytest.mark.parametrize(
    "content",
    [
        b"garbage",
        b"*3\r\n$3\r\nSETx\r\n$1\r\na\r\n",
        b"*2\r\n$3\r\nDEL\r\n?1\r\na\r\n" + WRITE,
        bytes(20) + WRITE,
        WRITE + b"x" + WRITE,
        b"*-1\r\n" + WRITE,
    ],
)
def test_what_is_damaged_before_its_end_is_no_unfinished_write(content: bytes) -> None:
    assert unfinished(content, 0) is None


@given(st.binary(max_size=200))
def test_any_bytes_get_an_answer(content: bytes) -> None:
    unfinished(content, 0)
