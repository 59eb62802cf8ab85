"""Routes of prompts that no gateway has tokenised."""

from __future__ import annotations

import numpy as np

from batcher.entries.carriers import Carried, CarrierEntry
from batcher.entries.prompt_routes import complete_routes
from batcher.scheduling.observations import RequestQueued
from charonia.generation.prompt_keys import PromptRoute, route_of_text, route_of_tokens
from charonia.tensors import Tensor
from charonia.wire import FILE, Reference, pack_request, request_meta, unpack_request


def queued(*tensors: Tensor, prompt: PromptRoute | None = None, reference: Reference | None = None) -> RequestQueued:
    meta = request_meta(1, "h", tensors, (), {})
    record = unpack_request(
        pack_request(
            *(bytes(16), b"g", b"", meta, [tensor.data for tensor in tensors]),
            rows=1,
            signature=7,
            level=0,
            accepted_ns=1,
            prompt=prompt,
            reference=reference,
        )
    )
    carrier = Carried(record, CarrierEntry(b"q", b"1-0", 1), 0)
    return RequestQueued(bytes(16), 1, 0, 1, 7, 0, 0, 0, 0, carrier, meta=record.meta)


def route_of(request: RequestQueued) -> PromptRoute | None:
    complete_routes([request])
    assert request.meta is not None
    return request.meta.prompt


STREAM = Tensor.of("stream", np.array([True]))
TEXT = Tensor.of("text_input", np.array([b"what is the capital of France " * 9], object))
IDS = Tensor.of("prompt_token_ids", np.arange(70, dtype=np.int32))


def test_the_prompt_is_named_as_it_is_given() -> None:
    assert route_of(queued(STREAM, TEXT)) == route_of_text(b"what is the capital of France " * 9)
    assert route_of(queued(STREAM, TEXT, IDS)) == route_of_tokens(range(70))


def test_what_the_gateway_said_is_kept() -> None:
    said = PromptRoute(3, 4, b"12345678")
    assert route_of(queued(STREAM, TEXT, prompt=said)) == said


def test_of_what_lies_elsewhere_only_the_length_is_known() -> None:
    for tensor, found in ((TEXT, PromptRoute(len(TEXT.data) // 4)), (IDS, PromptRoute(70)), (STREAM, None)):
        assert route_of(queued(tensor, reference=Reference(FILE, "g-1/f", len(tensor.data)))) == found
    assert route_of(queued(STREAM)) is None
    assert route_of(queued(Tensor.of("text_input", np.array([], object)))) == PromptRoute(1)
