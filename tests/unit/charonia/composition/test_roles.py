"""What a role refuses before it takes a lease or connects to the log."""

from __future__ import annotations

import pytest

from charonia.composition import roles
from charonia.errors import StartupError
from charonia.options.values import BATCHER, EXECUTOR, GATEWAY, WEBHOOKS, parse


@pytest.mark.parametrize(
    ("role", "option", "sentence"),
    [
        (GATEWAY, "--trace-config=bad", "--trace-config must be"),
        (EXECUTOR, "--rate-limit=bad", "--rate-limit must be"),
        (BATCHER, "--cache-config=bad", "--cache-config must be"),
        (WEBHOOKS, "--webhook-timeout-secs=3", "charonia webhooks needs --webhook-secrets"),
    ],
)
def test_values_are_checked_first(role: str, option: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fork(*_: object) -> None:
        pytest.fail("a lease was about to be taken")

    monkeypatch.setattr(roles, "configure_logging", lambda _: None)
    monkeypatch.setattr(roles.HeartbeatProcess, "fork", fork)
    with pytest.raises(StartupError, match=sentence):
        roles.run_role(role, parse(role, ["--log-url=unix:///none", option], {}, {}))
