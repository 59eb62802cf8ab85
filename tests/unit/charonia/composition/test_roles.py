"""What a role refuses before it takes a lease or connects to the log."""

from __future__ import annotations

import os

import pytest

from charonia.composition import roles
from charonia.composition.gateways import check_gateway
from charonia.errors import StartupError
from charonia.options.values import BATCHER, CONSOLE, EXECUTOR, GATEWAY, WEBHOOKS, parse


@pytest.mark.parametrize(
    ("role", "option", "sentence"),
    [
        (GATEWAY, "--trace-config=bad", "--trace-config must be"),
        (EXECUTOR, "--rate-limit=bad", "--rate-limit must be"),
        (BATCHER, "--cache-config=bad", "--cache-config must be"),
        (GATEWAY, "--api-keys=/none/such", "--api-keys: /none/such cannot be read"),
        (GATEWAY, f"--api-keys=/{'x' * 300}", "cannot be read: File name too long"),
        (GATEWAY, "--tenant-header=a:b", "--tenant-header must be the name of a header"),
        (GATEWAY, "--http-use-ssl=true", "--http-use-ssl needs --http-server-key"),
        (GATEWAY, "--http-restricted-api=bad:a=b", "unknown restricted api 'bad'"),
        (EXECUTOR, "--blob-url=bad://blobs", "the URL of --blob-url must begin with redis://"),
        (BATCHER, "--log-url=bad://log", "the event log URL must begin with redis://"),
        (BATCHER, "--cache-config=redis,host=h,port=99999", "the URL of --cache-config cannot be read"),
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


@pytest.mark.parametrize("role", [GATEWAY, BATCHER, EXECUTOR, WEBHOOKS, CONSOLE])
def test_each_role_checks_the_urls_that_it_has(role: str) -> None:
    values = parse(role, ["--log-url=unix:///none", "--blob-url=unix:///none"], {}, {})
    roles.check_urls(values)
    with pytest.raises(StartupError, match="names no socket path"):
        roles.check_urls({**values, "log_url": "unix://"})


@pytest.mark.parametrize("role", [WEBHOOKS, CONSOLE])
async def test_a_role_without_the_cache_knows_whether_the_log_is_safe(role: str) -> None:
    values = parse(role, ["--log-url=unix:///none", "--require-secure-log=true"], {}, {})
    await roles.check_servers(values, values["log_url"])


@pytest.mark.parametrize("option", ["--log-password-file", "--blob-password-file", "--api-keys"])
def test_checks_leave_what_comes_through_a_pipe_to_its_reader(option: str) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as end:
        with os.fdopen(writer, "wb") as secrets:
            secrets.write(b"[tenants.a]")
        urls = ["--log-url=unix:///none", "--blob-url=redis://me@blobs"]
        values = parse(GATEWAY, [*urls, f"{option}=/dev/fd/{reader}"], {}, {})
        roles.check_urls(values)
        check_gateway(values)
        assert end.read() == b"[tenants.a]"


def test_a_password_that_needs_a_url_is_refused_without_being_read() -> None:
    values = parse(GATEWAY, ["--log-url=unix:///none", "--blob-password-file=/dev/null"], {}, {})
    with pytest.raises(StartupError, match="--blob-password-file needs --blob-url"):
        roles.check_urls(values)


def test_webhooks_need_no_password_of_a_server_that_they_do_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    class ForkedError(Exception):
        pass

    def fork(*_: object) -> None:
        raise ForkedError

    monkeypatch.setattr(roles, "configure_logging", lambda _: None)
    monkeypatch.setattr(roles.HeartbeatProcess, "fork", fork)
    options = ["--log-url=unix:///none", "--blob-url=redis://blobs", "--blob-password-file=/none/such"]
    with pytest.raises(ForkedError):
        roles.run_role(WEBHOOKS, parse(WEBHOOKS, [*options, "--webhook-secrets=/none"], {}, {}))
