"""Names the blocks of a prompt by chained 64-bit hashes: equal names mean an equal text up to the end of the block.

Pure. Engines find computed blocks by them; prompts can be compared with what an engine holds before they are sent to
it. The chain begins with the adapter, since keys and values of one text differ between adapters.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_BYTES = 8


def root_hash(adapter: str, salt: bytes = b"") -> int:
    """The begin of a chain. `salt` keeps the blocks of those with another salt apart, as of versions or tenants."""
    key = hashlib.blake2b(salt, digest_size=32).digest()
    return int.from_bytes(hashlib.blake2b(adapter.encode(), digest_size=_BYTES, key=key).digest(), "little")


def next_hash(parent: int, tokens: npt.NDArray[np.int32]) -> int:
    """The name of the block with these tokens after the one that is named `parent`."""
    data = parent.to_bytes(_BYTES, "little") + tokens.astype("<i4", copy=False).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=_BYTES).digest(), "little")
