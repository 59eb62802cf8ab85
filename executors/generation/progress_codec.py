"""The progress of one response of a text: what is needed to give the response again without running the model.

Pure.

    u8  flags: 1 a seed follows, 2 a sum of log probabilities follows, 4 candidates are at the end, 8 the log
        probabilities of the prompt follow the tokens
    u32 how many tokens
    i64 the seed of the request, in its first response
    f64 the sum of the log probabilities up to this response
    i32 each token
    u32 how many bytes of JSON follow: the output `prompt_logprobs`, in the first response
    ... JSON of the candidates, as in the output `logprobs`

All numbers are little-endian. `executors.generation.text_answer` writes and reads it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from charonia.errors import InvalidArgument

_HEAD = struct.Struct("<BI")
_SEED = struct.Struct("<q")
_SUM = struct.Struct("<d")
_LENGTH = struct.Struct("<I")
_HAS_SEED, _HAS_SUM, _HAS_CANDIDATES, _HAS_PROMPT = 1, 2, 4, 8

_OTHER_LENGTH = "the progress of a text has another length than it says"


@dataclass(frozen=True, slots=True)
class ResponseProgress:
    """What one response said."""

    tokens: tuple[int, ...]
    seed: int | None = None
    cumulative: float | None = None
    candidates: bytes | None = None
    prompt_candidates: bytes | None = None


def pack_progress(progress: ResponseProgress) -> bytes:
    flags, middle, end = 0, b"", b""
    if progress.seed is not None:
        flags |= _HAS_SEED
        middle = _SEED.pack(progress.seed)
    if progress.cumulative is not None:
        flags |= _HAS_SUM
        middle += _SUM.pack(progress.cumulative)
    if progress.candidates is not None:
        flags |= _HAS_CANDIDATES
        end = progress.candidates
    if progress.prompt_candidates is not None:
        flags |= _HAS_PROMPT
        end = _LENGTH.pack(len(progress.prompt_candidates)) + progress.prompt_candidates + end
    count = len(progress.tokens)
    return _HEAD.pack(flags, count) + middle + struct.pack(f"<{count}i", *progress.tokens) + end


def unpack_progress(data: bytes) -> ResponseProgress:
    """Raises `InvalidArgument` for bytes that `pack_progress` did not write."""
    try:
        flags, count = _HEAD.unpack_from(data)
        at = _HEAD.size
        seed = cumulative = None
        if flags & _HAS_SEED:
            (seed,) = _SEED.unpack_from(data, at)
            at += _SEED.size
        if flags & _HAS_SUM:
            (cumulative,) = _SUM.unpack_from(data, at)
            at += _SUM.size
        tokens = struct.unpack_from(f"<{count}i", data, at)
        at += 4 * count
        prompt = None
        if flags & _HAS_PROMPT:
            (length,) = _LENGTH.unpack_from(data, at)
            prompt = bytes(data[at + _LENGTH.size : at + _LENGTH.size + length])
            if len(prompt) < length:
                raise InvalidArgument(_OTHER_LENGTH)
            at += _LENGTH.size + length
    except struct.error as error:
        raise InvalidArgument(f"the progress of a text cannot be read: {error}") from None
    rest = bytes(data[at:])
    if bool(rest) != bool(flags & _HAS_CANDIDATES):
        raise InvalidArgument(_OTHER_LENGTH)
    return ResponseProgress(tokens, seed, cumulative, rest or None, prompt)
