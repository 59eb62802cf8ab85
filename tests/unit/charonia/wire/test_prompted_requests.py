"""Requests whose prompt was tokenised: their records, and what readers share of them."""

from __future__ import annotations

import msgpack
import pytest

from charonia.datatypes import DataType
from charonia.errors import InvalidRecord
from charonia.generation.prompt_keys import PromptRoute, route_of_tokens
from charonia.tensors import Tensor
from charonia.wire import FIELD_RECORDS, pack_request, record_fields, request_meta, unpack_request
from charonia.wire.requests import carried_in, meta_of

META = request_meta(1, "h", [Tensor("x", DataType.UINT8, (3,), b"abc")], ("y",), {"a": 1})


def record(prompt: PromptRoute | None, number: int = 1) -> bytes:
    request_id = number.to_bytes(16, "big")
    return pack_request(
        *(request_id, b"g", b"", META, [b"abc"]), rows=1, signature=7, level=0, accepted_ns=1, prompt=prompt
    )


@pytest.mark.parametrize("tokens", [0, 31, 32, 700, 200_000])
def test_a_prompt_is_read_again(tokens: int) -> None:
    prompt = route_of_tokens(range(tokens), "french", 12)
    found = unpack_request(record(prompt))
    assert (found.meta.prompt, bytes(found.data), found.meta.parameters) == (prompt, b"abc", {"a": 1})
    assert found.meta.packed == META.packed


def test_requests_of_other_prompts_share_their_meta_and_none_without_a_prompt_has_one() -> None:
    first, second = (unpack_request(record(route_of_tokens(range(at, at + 64)))) for at in (0, 1))
    assert first.meta.inputs is second.meta.inputs
    assert first.meta.prompt != second.meta.prompt
    assert unpack_request(record(None)).meta.prompt is None


def test_requests_in_one_entry_keep_their_own_prompts() -> None:
    prompts = [route_of_tokens(range(at, at + 64)) for at in (0, 0, 1, 2)]
    fields = record_fields([record(prompt, at) for at, prompt in enumerate(prompts)])
    assert fields[0] == FIELD_RECORDS
    assert [one.meta.prompt for one in carried_in(fields, lambda wave: [])] == prompts


@pytest.mark.parametrize("value", [7, b"", b"\x02\0", b"abc", b"x" * 8 + b"\x0a\0", b"x" * 2000, [1], "text", None])
def test_another_sixth_value_is_skipped(value: object) -> None:
    values = msgpack.unpackb(META.packed)
    found = meta_of(msgpack.packb([*values, value]))
    assert (found.version, found.outputs, found.size_bytes) == (1, ("y",), 3)
    assert found.prompt is None or found.prompt.keys == b""
    assert meta_of(msgpack.packb([*values, value, 1])).prompt is None


def test_a_prompt_in_front_of_which_there_is_no_meta() -> None:
    route = PromptRoute(5).pack()
    with pytest.raises(InvalidRecord):
        meta_of(b"\x96" + msgpack.packb(route + (len(route) + 2).to_bytes(2, "little")))
