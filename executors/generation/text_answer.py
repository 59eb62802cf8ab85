"""Makes the responses of one request for text of what an engine gives, with the tensors of
`charonia.generation.text_tensors`.

Pure. What was given and not sent yet waits here, so that a reader who is slow gets fewer and larger responses.
`executors.generation.text_requests` reads requests, `executors.generation.progress_codec` packs the progress.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence

import orjson

from charonia.backend import ModelResponse
from charonia.datatypes import DataType
from charonia.generation.detokenizer import Detokenizer
from charonia.generation.text_tensors import UNFINISHED
from charonia.generation.tokenizer import Tokenizer
from charonia.tensors import Tensor

from .engine import TokenEvent, TokenLogprob
from .progress_codec import ResponseProgress, pack_progress, unpack_progress
from .text_requests import Prepared, TextRequest

_ONE = (1,)
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<I")
_REAL = struct.Struct("<f")


class TextAnswer:
    """One request's answer so far. `sent` counts its responses, `tokens` those that were taken and not sent."""

    def __init__(self, request: TextRequest, prepared: Prepared, tokenizer: Tokenizer) -> None:
        self.stream = request.stream
        self.sent = 0
        self.tokens: list[int] = []
        self.finish = ""
        self._interval = request.interval
        self._returns = request.returns
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._text = ""
        if request.includes_prompt:
            self._text = request.text if request.ids is None or request.text else _decoded(tokenizer, prepared.prompt)
        self._has_logprobs = prepared.parameters.reports_candidates
        self._cumulative = 0.0
        self._candidates: list[dict[str, object]] = []
        self._prompt_candidates: bytes | None = None
        """Those of the prompt, until the first response."""

    def replay(self, progress: Iterable[bytes]) -> tuple[list[ModelResponse], list[int]]:
        """The responses that an earlier attempt gave, and their tokens. Raises `InvalidArgument` for wrong progress."""
        detokenizer = Detokenizer(self._tokenizer, self._prepared.parameters)
        responses: list[ModelResponse] = []
        emitted: list[int] = []
        for packed in progress:
            one = unpack_progress(packed)
            text = "".join(map(detokenizer.push, one.tokens))
            self._cumulative = one.cumulative or 0.0
            self.sent += 1
            self._prompt_candidates = one.prompt_candidates
            responses.append(self._response(one.tokens, text, UNFINISHED, one.candidates, bytes(packed)))
            emitted += one.tokens
        return responses, emitted

    def take(self, event: TokenEvent) -> None:
        """What a step gave."""
        self.tokens += event.tokens
        self._text += event.text
        self.finish = event.finish
        if event.prompt_logprobs is not None:
            self._prompt_candidates = orjson.dumps([None, *map(self._described, event.prompt_logprobs)])
        for candidates in event.logprobs:
            self._cumulative += candidates[0].logprob
            if "logprobs" in self._returns:
                self._candidates.append(self._described(candidates))

    @property
    def is_due(self) -> bool:
        """Whether there is a response to send: of a stream after each step, or after so many tokens as were asked for;
        of others after the last.
        """
        return bool(self.finish) or (self.stream and len(self.tokens) >= self._interval)

    def response(self) -> ModelResponse:
        """The next response, of all that was taken since the one before."""
        tokens, self.tokens = self.tokens, []
        text, self._text = self._text, ""
        candidates = None
        if "logprobs" in self._returns and self._has_logprobs:
            candidates = orjson.dumps(self._candidates)
            self._candidates = []
        progress = b""
        if not self.finish:
            seed = self._prepared.parameters.seed if not self.sent else None
            cumulative = self._cumulative if self._has_logprobs else None
            said = ResponseProgress(tuple(tokens), seed, cumulative, candidates, self._prompt_candidates)
            progress = pack_progress(said)
        self.sent += 1
        return self._response(tokens, text, self.finish or UNFINISHED, candidates, progress)

    def _response(
        self, tokens: Sequence[int], text: str, finish: str, candidates: bytes | None, progress: bytes
    ) -> ModelResponse:
        outputs = [_bytes_tensor("text_output", text.encode())]
        prompt, self._prompt_candidates = self._prompt_candidates, None
        returns = self._returns
        if returns:
            if "finish_reason" in returns:
                outputs.append(_bytes_tensor("finish_reason", finish.encode()))
            if "cumulative_logprob" in returns:
                cumulative = self._cumulative if self._has_logprobs else math.nan
                outputs.append(Tensor("cumulative_logprob", DataType.FP32, _ONE, _REAL.pack(cumulative)))
            if "logprobs" in returns:
                outputs.append(_bytes_tensor("logprobs", b"null" if candidates is None else candidates))
            if "prompt_logprobs" in returns:
                outputs.append(_bytes_tensor("prompt_logprobs", b"null" if prompt is None else prompt))
            if "num_input_tokens" in returns:
                count = _NUMBER.pack(len(self._prepared.prompt))
                outputs.append(Tensor("num_input_tokens", DataType.UINT32, _ONE, count))
            if "num_output_tokens" in returns:
                outputs.append(Tensor("num_output_tokens", DataType.UINT32, _ONE, _NUMBER.pack(len(tokens))))
            if "token_ids" in returns:
                data = struct.pack(f"<{len(tokens)}i", *tokens)
                outputs.append(Tensor("token_ids", DataType.INT32, (len(tokens),), data))
        read = len(self._prepared.prompt) if self.sent == 1 else 0
        return ModelResponse(outputs, progress=progress, tokens=len(tokens) + read)

    def _described(self, candidates: Iterable[TokenLogprob]) -> dict[str, object]:
        return {
            str(one.token): {
                "logprob": one.logprob,
                "rank": one.rank,
                "decoded_token": self._tokenizer.token_bytes(one.token).decode(errors="replace"),
            }
            for one in candidates
        }


def _decoded(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    return bytes(tokenizer.decode(list(tokens))).decode(errors="replace")


def _bytes_tensor(name: str, element: bytes) -> Tensor:
    return Tensor(name, DataType.BYTES, _ONE, _LENGTH.pack(len(element)) + element)
