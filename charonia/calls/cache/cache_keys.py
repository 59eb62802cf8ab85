"""Decides which requests may be answered from the cache, and which of them are equal (K2). Pure.

The key covers all that determines the answer: the model, its version and content (so that a reload starts empty), the
tenant unless the model shares, the inputs with shapes, datatypes and bytes, the requested outputs, the parameters. It
leaves out the request's id, deadline, timeout and priority. Digests are 32 bytes of BLAKE2b, so keys are not compared
further; every part is preceded by its length, so that different requests never hash the same text.
"""

from __future__ import annotations

import hashlib
import struct

from charonia.catalog.catalog import ServedVersion
from charonia.errors import ConfigError
from charonia.inference import RECEIPT, InferenceRequest
from charonia.models.caching import CachingRules, caching_rules
from charonia.tensors import Buffer

_LENGTH = struct.Struct("<Q")


def rules_of(served: ServedVersion) -> CachingRules | None:
    """The caching rules of a served version; None when its responses are not cached, or its settings are invalid."""
    try:
        return caching_rules(served.config)
    except ConfigError:
        return None  # the executor that loaded it did not know these settings


def is_cachable(request: InferenceRequest) -> bool:
    """False for steps of sequences, and for requests that ask what they have used themselves (ADR 0055)."""
    if request.parameters and RECEIPT in request.parameters:
        return False
    return not (request.sequence_id or request.sequence_start or request.sequence_end)


def cache_key(request: InferenceRequest, served: ServedVersion, rules: CachingRules, tenant: str) -> bytes:
    """The digest of an admitted request; equal if and only if their answers may be shared. The order of inputs and of
    requested outputs does not matter: answers are put in order for each caller. Names of outputs are the model's, each
    once.
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
    # a tenant may have an empty name, which differs from a cache shared by all tenants
    text("" if rules.shared else "=" + tenant)
    inputs = [t for t in request.inputs if rules.inputs is None or t.name in rules.inputs]
    part(_LENGTH.pack(len(inputs)))
    for tensor in sorted(inputs, key=lambda t: t.name):
        text(tensor.name)
        text(tensor.datatype.value)
        part(struct.pack(f"<{len(tensor.shape)}q", *tensor.shape))
        part(tensor.data)
    # naming all outputs equals naming none: so steps of ensembles and clients share answers
    wanted = () if len(request.outputs) == len(served.interface.outputs) else request.outputs
    part(_LENGTH.pack(len(wanted)))
    for name in sorted(wanted):
        text(name)
    for name, value in sorted(request.parameters.items()):
        text(name)
        text(type(value).__name__)
        text(repr(value))
    return digest.digest()
