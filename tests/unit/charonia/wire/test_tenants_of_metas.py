"""The tenant in a request's meta, the sizes of answers, and parameters that are added to an answer."""

from __future__ import annotations

import numpy as np
import pytest

from charonia.datatypes import DataType
from charonia.errors import InternalError
from charonia.generation.prompt_keys import PromptRoute
from charonia.inference import RECEIPT
from charonia.tensors import Tensor
from charonia.wire import (
    Reference,
    pack_failure,
    pack_request,
    pack_response,
    pack_wave_reply,
    refer_response,
    reply_meta,
    request_meta,
    response_sizes,
    time_response,
    unpack_request,
    unpack_response,
    unpack_wave,
    wave_head,
    wave_reply_bytes,
    with_parameters,
)
from charonia.wire.records import FILE

INPUT = Tensor.of("x", np.zeros((1, 4), np.float32))
OUTPUT = Tensor.of("y", np.zeros((1, 3), np.float32))
META = request_meta(1, "h", [INPUT], ("y",), {"a": 1})
ID = bytes(range(16))


@pytest.mark.parametrize("prompt", [None, PromptRoute(70, 9, bytes(16))])
def test_a_request_has_its_tenant(prompt: PromptRoute | None) -> None:
    meta = META.of_tenant("north wind")
    about = {"rows": 1, "signature": 2, "level": 0, "accepted_ns": 3}
    packed = pack_request(ID, b"g", b"", meta, [INPUT.data], prompt=prompt, **about)  # type: ignore[arg-type]
    found = unpack_request(packed)
    assert (found.meta.tenant, found.meta.prompt, found.meta.parameters) == ("north wind", prompt, {"a": 1})
    assert (found.meta.inputs, found.meta.outputs, bytes(found.data)) == (META.inputs, ("y",), bytes(INPUT.data))


def test_a_meta_without_a_tenant_stays_as_it_is() -> None:
    assert META.of_tenant("") is META
    meta = META.of_tenant("acme")
    assert meta.of_tenant("other") is meta
    assert META.of_tenant("acme") is meta  # made once
    assert META.tenant == ""


def test_requests_of_a_wave_have_its_tenant_even_if_their_strings_differ_in_length() -> None:
    texts = [Tensor("s", DataType.BYTES, (1,), size.to_bytes(4, "little") + b"x" * size) for size in (1, 2)]
    meta = request_meta(1, "h", texts[:1], (), {}).of_tenant("acme")
    head = wave_head(
        ID[:15], 2, b"g", meta, rows=1, signature=1, level=0, accepted_ns=1, sizes=[[len(t.data) for t in texts]]
    )
    wave = unpack_wave(head + b"".join(bytes(t.data) for t in texts))
    assert wave.meta.tenant == "acme"
    assert [request.meta.tenant for request in wave.requests()] == ["acme", "acme"]


def test_only_true_asks_for_a_receipt() -> None:
    for value, wanted in ((True, True), (False, False), (1, False), ("true", False)):
        assert request_meta(1, "h", [INPUT], (), {RECEIPT: value}).wants_receipt is wanted


def test_sizes_of_answers() -> None:
    plain = pack_response(ID, "m", 1, [OUTPUT], {})
    placed = time_response(pack_response(ID, "m", 1, [OUTPUT], {"a": "b"}, place=(1, 2)), (1, 2, 3))
    referred = refer_response(placed, Reference(FILE, "e-1/s1-3-1000", 123))
    failed = pack_failure(ID, "m", 1, InternalError("no"))
    assert response_sizes([plain, placed, referred, failed, b""]) == [12, 12, 123, 0, 0]
    meta = reply_meta("m", 1, (("y", DataType.FP32, (1, 3), 12),))
    assert wave_reply_bytes(pack_wave_reply(ID[:15], 2, meta, [bytes(24)], 1)) == 24
    assert wave_reply_bytes(pack_wave_reply(ID[:15], 2, meta, [], 1, Reference(FILE, "e-1/s1-3-1000", 24))) == 24


def test_parameters_are_added_to_an_answer_with_all_that_it_has() -> None:
    answer = time_response(pack_response(ID, "m", 1, [OUTPUT], {"a": "b"}, place=(1, 2)), (1, 2, 3))
    found, before = unpack_response(with_parameters(answer, {"c": True})), unpack_response(answer)
    assert found.parameters == {"a": "b", "c": True}
    assert (found.outputs, found.place, found.times) == (before.outputs, before.place, before.times)
    failure = pack_failure(ID, "m", 1, InternalError("no"))
    told = unpack_response(with_parameters(failure, {RECEIPT: "{}"}))
    assert (told.parameters, told.outputs, told.place) == ({RECEIPT: "{}"}, [], unpack_response(failure).place)
    assert told.error is not None
    assert (told.error.message, told.error.receipt) == (unpack_response(failure).error.message, "{}")  # type: ignore[union-attr]
    assert unpack_response(with_parameters(failure, {RECEIPT: "a\nb"})).error.receipt == ""  # type: ignore[union-attr]
