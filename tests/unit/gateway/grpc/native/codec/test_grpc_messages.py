"""Messages within data, and their compression: whole, broken, and larger than they seem."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest

from gateway.grpc.native.codec.grpc_messages import PREFIX, Assembler, MessageFault, Packed, framed
from gateway.grpc.statuses import Status

LIMIT_BYTES = 100_000


def whole(message: bytes, flag: int = 0) -> bytes:
    return PREFIX.pack(flag, len(message)) + message


def pack(encoding: str, message: bytes) -> bytes:
    return gzip.compress(message) if encoding == "gzip" else zlib.compress(message)


def fault_of(assembler: Assembler, data: bytes) -> tuple[Status, str]:
    with pytest.raises(MessageFault) as caught:
        assembler.feed(data)
    return caught.value.status, str(caught.value)


class TestAssembling:
    def test_messages_and_parts_of_them(self) -> None:
        assembler = Assembler("identity", LIMIT_BYTES)
        assert assembler.is_between
        assert assembler.feed(whole(b"a") + whole(b"") + whole(b"bcd")[:6]) == [b"a", b""]
        assert not assembler.is_between
        assert assembler.feed(b"") == []
        assert assembler.feed(b"c") == []
        assert assembler.feed(b"d" + whole(b"e")[:3]) == [b"bcd"]
        assert not assembler.is_between
        assert assembler.feed(whole(b"e")[3:]) == [b"e"]
        assert assembler.is_between

    @pytest.mark.parametrize("encoding", ["gzip", "deflate"])
    def test_compressed_and_plain_ones(self, encoding: str) -> None:
        assembler = Assembler(encoding, LIMIT_BYTES)
        large = b"x" * LIMIT_BYTES
        data = whole(pack(encoding, large), 1) + whole(b"plain") + whole(pack(encoding, b""), 1) + whole(b"", 1)
        messages = [one.unpacked() if isinstance(one, Packed) else one for one in assembler.feed(data)]
        assert messages == [large, b"plain", b"", b""]

    @pytest.mark.parametrize(("encoding", "flag"), [("identity", 1), ("gzip", 2), ("gzip", 255)])
    def test_a_flag_that_means_nothing(self, encoding: str, flag: int) -> None:
        assert fault_of(Assembler(encoding, LIMIT_BYTES), whole(b"x", flag)) == (
            Status.INTERNAL, "message is marked as compressed, but its call names no compression",
        )  # fmt: skip

    def test_a_length_that_no_message_has(self) -> None:
        assert Assembler("identity", 1).feed(PREFIX.pack(0, 0x7FFFFFFF)) == []
        assert fault_of(Assembler("identity", 1), PREFIX.pack(0, 0x80000000)) == (
            Status.RESOURCE_EXHAUSTED, "Received message larger than max (2147483648 vs. 2147483647)",
        )  # fmt: skip

    def test_a_method_may_take_less(self) -> None:
        assert Assembler("identity", 1, None, 10).feed(whole(bytes(10))) == [bytes(10)]
        assert fault_of(Assembler("identity", 1, None, 10), PREFIX.pack(0, 11)) == (
            Status.RESOURCE_EXHAUSTED, "Received message larger than max (11 vs. 10)",
        )  # fmt: skip
        (packed,) = Assembler("gzip", 1000, None, 100).feed(whole(pack("gzip", bytes(101)), 1))
        assert isinstance(packed, Packed)
        with pytest.raises(MessageFault, match="exceeds the maximum"):
            packed.unpacked()

    def test_many_parts_are_put_together_once(self) -> None:
        """The message grows where it is: there is never a copy of all of it."""
        part, count = bytes(64 * 1024), 500
        assembler = Assembler("identity", 1, lambda _size, _begin: None)
        assembler.feed(PREFIX.pack(0, len(part) * count))
        tracemalloc.start()
        for _ in range(count - 1):
            assert assembler.feed(part) == []
        (message,) = assembler.feed(part)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 1.3 * len(part) * count
        assert isinstance(message, memoryview)
        assert len(message) == len(part) * count


class TestDecompression:
    @pytest.mark.parametrize("encoding", ["gzip", "deflate"])
    def test_up_to_the_limit(self, encoding: str) -> None:
        for size in (0, 1, LIMIT_BYTES):
            assert Packed(encoding, pack(encoding, bytes(size)), LIMIT_BYTES).unpacked() == bytes(size)
        with pytest.raises(MessageFault) as caught:
            Packed(encoding, pack(encoding, bytes(LIMIT_BYTES + 1)), LIMIT_BYTES).unpacked()
        assert caught.value.status is Status.RESOURCE_EXHAUSTED
        assert str(caught.value) == (
            "decompressed request exceeds the maximum allowed input size of 100000 bytes. Use --http-max-input-size to "
            "increase the limit."
        )

    def test_a_bomb_is_never_large(self) -> None:
        bomb = gzip.compress(bytes(32 * 1024 * 1024), 1)
        tracemalloc.start()
        with pytest.raises(MessageFault, match="exceeds"):
            Packed("gzip", bomb, 4 * 1024 * 1024).unpacked()
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 8 * 1024 * 1024

    @pytest.mark.parametrize("encoding", ["gzip", "deflate"])
    def test_what_is_broken(self, encoding: str) -> None:
        good = pack(encoding, b"some message" * 50)
        for broken, text in (
            (b"", "it is truncated"),
            (b"no zip", "incorrect header check"),
            (good[:-1], "it is truncated"),
            (good[: len(good) // 2], "it is truncated"),
            (good[:-6] + b"\0" + good[-5:], "Error -3"),
            (good + b"x", "there is more after its end"),
            (good + good, "there is more after its end"),
        ):
            with pytest.raises(MessageFault) as caught:
                Packed(encoding, broken, LIMIT_BYTES).unpacked()
            assert caught.value.status is Status.INTERNAL
            assert str(caught.value).startswith("failed to decompress the message: ")
            assert text in str(caught.value), broken


class TestFraming:
    def test_uncompressed(self) -> None:
        assert framed([b"abc"]) == [b"\0\0\0\0\3", b"abc"]
        assert framed([b"ab", memoryview(b"c")]) == [b"\0\0\0\0\3", b"ab", b"c"]
        assert framed([b""]) == [b"\0\0\0\0\0", b""]

    @pytest.mark.parametrize("level", [1, 6, 9])
    def test_compressed_where_that_helps(self, level: int) -> None:
        prefix, packed = framed([b"a" * 600, b"a" * 400], level)
        assert PREFIX.unpack(prefix) == (1, len(packed))
        assert gzip.decompress(packed) == b"a" * 1000
        assert len(packed) < 100
        for short in (b"", b"a", b"random enough"):
            assert framed([short], level) == framed([short])
