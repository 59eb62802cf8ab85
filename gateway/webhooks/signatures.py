"""Signatures of the Standard Webhooks specification: secrets, and signing. Pure.

The signed text is `<id>.<timestamp>.<body>`, a signature `v1,<base64 of HMAC-SHA256>`. With several secrets, while one
replaces another, each signs, and the signatures are listed together. `keyring` reads the secrets.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

PREFIX = "whsec_"
LEAST_BYTES, MAX_BYTES = 24, 64
"""The specification's bounds of a secret."""


def parse_secret(text: str) -> bytes:
    """The key in `whsec_<base64>`. Raises `ValueError`, with a text that does not reveal the secret."""
    if not text.startswith(PREFIX):
        raise ValueError(f"a webhook secret starts with {PREFIX}")
    try:
        secret = base64.b64decode(text.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"what follows {PREFIX} in a webhook secret must be base64") from None
    if not LEAST_BYTES <= len(secret) <= MAX_BYTES:
        raise ValueError(f"a webhook secret has {LEAST_BYTES} to {MAX_BYTES} bytes, got {len(secret)}")
    return secret


def sign(secrets: Sequence[bytes], message_id: str, timestamp_s: int, body: bytes) -> str:
    """The value of `webhook-signature`: one signature per secret, separated by spaces."""
    signed = f"{message_id}.{timestamp_s}.".encode() + body
    return " ".join(
        "v1," + base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode() for secret in secrets
    )
