"""Signatures as receivers verify them."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from gateway.webhooks.signatures import PREFIX, parse_secret, sign

SECRETS = st.binary(min_size=24, max_size=64)


def render_secret(secret: bytes) -> str:
    return PREFIX + base64.b64encode(secret).decode()


def test_the_published_vector() -> None:
    secret = parse_secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signature = sign([secret], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@given(st.lists(SECRETS, min_size=1, max_size=3, unique=True), st.dictionaries(st.text(), st.integers()), st.data())
def test_each_secret_verifies_by_the_reference_library(
    secrets: list[bytes], payload: dict[str, int], data: st.DataObject
) -> None:
    import json

    body = json.dumps(payload)
    now_s = int(datetime.now(UTC).timestamp())
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(now_s),
        "webhook-signature": sign(secrets, "msg_1", now_s, body.encode()),
    }
    for secret in secrets:
        assert Webhook(render_secret(secret)).verify(body, headers) == payload
    other = data.draw(SECRETS.filter(lambda secret: secret not in secrets))
    with pytest.raises(WebhookVerificationError):
        Webhook(render_secret(other)).verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(render_secret(secrets[0])).verify(body + " ", headers)


@given(SECRETS)
def test_a_secret_is_read_as_it_was_written(secret: bytes) -> None:
    assert parse_secret(render_secret(secret)) == secret


@pytest.mark.parametrize(
    "text", ["", "whsec_", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_!!!", "whsec_QUJD", "whsec_é"]
)
def test_what_is_no_secret_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(ValueError, match="webhook secret") as refused:
        parse_secret(text)
    assert len(text) < 8 or text not in str(refused.value)
