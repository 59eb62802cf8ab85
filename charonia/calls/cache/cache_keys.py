"""Which requests may be answered from the cache, and what makes two of them equal (K2). Pure.

The key covers all that decides about the answer: the model, its version and content (so that a reload starts empty),
the tenant unless the model shares, the inputs with shapes, datatypes and bytes, the outputs wanted, the parameters.
Not the request's id, deadline, timeout or priority. Digests are 32 bytes of BLAKE2b, so keys are not compared further;
every part is preceded by its length, so that no two requests have one text.
"""

from __future__ import annotations

import hashlib
import struct

from charonia.catalog.catalog import ServedVersion
from charonia.errors import ConfigError
from charonia.inference import InferenceRequest
from charonia.models.caching import CachingRules, caching_rules
from charonia.tensors import Buffer

_LENGTH = struct.Struct("<Q")


def rules_of(served: ServedVersion) -> CachingRules | None:
    """The rules of a served version; None when its responses are not cached, also when its words make no sense."""
    try:
        return caching_rules(served.config)
    except ConfigError:
        return None  # the executor that loaded it knew no such words


def is_cachable(request: InferenceRequest) -> bool:
    """Not steps of sequences."""
    return not (request.sequence_id or request.sequence_start or request.sequence_end)


def cache_key(request: InferenceRequest, served: ServedVersion, rules: CachingRules, tenant: str) -> bytes:
    """The digest of an admitted request; equal if and only if its answer may be another's.

    The order of inputs and of outputs wanted does not matter: answers are put in order for each caller. Names of
    outputs are the model's, each once.
    """
    digest = hashlib.blake2b(digest_size=32)

    def part(data: Buffer) -> None:
        digest.update(_LENGTH.pack(len(data)))
        digest.update(data)

    def text(words: str) -> None:
        part(words.encode("utf-8", "surrogatepass"))

    text(served.model)
    text(str(served.version))
    text(served.content_hash)
    # a tenant may have no name; that all share is another thing
    text("" if rules.shared else "=" + tenant)
    inputs = [t for t in request.inputs if rules.inputs is None or t.name in rules.inputs]
    part(_LENGTH.pack(len(inputs)))
    for tensor in sorted(inputs, key=lambda t: t.name):
        text(tensor.name)
        text(tensor.datatype.value)
        part(struct.pack(f"<{len(tensor.shape)}q", *tensor.shape))
        part(tensor.data)
    # all of them by name is the same as none: so steps of ensembles have what clients were answered
    wanted = () if len(request.outputs) == len(served.interface.outputs) else request.outputs
    part(_LENGTH.pack(len(wanted)))
    for name in sorted(wanted):
        text(name)
    for name, value in sorted(request.parameters.items()):
        text(name)
        text(type(value).__name__)
        text(repr(value))
    return digest.digest()
