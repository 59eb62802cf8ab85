"""Who calls: by the proxy's header, by API key, and what happens when the file of keys changes or breaks."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

import pytest

import gateway.access.tenants
from charonia.errors import StartupError, Unauthenticated
from charonia.keys import lane_of
from charonia.options.settings import GatewaySettings
from gateway.access.tenants import Tenants, table_of
from gateway.access.terms import TenantBounds
from gateway.access.token_bounds import TokenBounds
from gateway.requests.delivery import Caller

GOOD = """
[tenants.acme]
keys = ["one", "sha256:{}"]
weight = 2
max_pending_requests = 5
max_pending_bytes = 7
max_text_tokens = 11
max_pending_tokens = 13
[tenants."north wind"]
keys = ["three"]
""".format(hashlib.sha256(b"two").hexdigest())


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"accept", b"*/*"), (b"authorization", b"Bearer " + key.encode())]


def write(path: Path, text: str, at_ns: int) -> None:
    path.write_text(text)
    os.utime(path, ns=(at_ns, at_ns))


def test_nobody_is_asked_without_the_options() -> None:
    assert Tenants.of(GatewaySettings("g")) is None
    with pytest.raises(StartupError, match="give one of them"):
        Tenants.of(GatewaySettings("g", tenant_header="x-tenant", api_keys="keys.toml"))
    with pytest.raises(StartupError, match="must be the name of a header, got 'a b'"):
        Tenants.of(GatewaySettings("g", tenant_header="a b"))


def test_the_proxy_names_the_tenant() -> None:
    tenants = Tenants("X-Tenant", "")
    assert tenants.identify([(b"x-tenant", b"acme")]) == Caller("acme", scoped=True)
    assert tenants.identify([(b"other", b"acme")]) == Caller("", scoped=True)
    assert tenants.identify([(b"x-tenant", b"acme"), (b"x-tenant", b"acme")]) == Caller("acme", scoped=True)
    assert tenants.bounds("acme") == TenantBounds()
    for headers in (
        [(b"x-tenant", b"acme"), (b"x-tenant", b"other")],
        [(b"x-tenant", b"")],
        [(b"x-tenant", b"a\x00b")],
        [(b"x-tenant", "\u00e9".encode())],
        [(b"x-tenant", b"a" * 129)],
    ):
        with pytest.raises(Unauthenticated, match="does not name one tenant"):
            tenants.identify(headers)


def test_keys_stand_for_tenants(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(GOOD)
    tenants = Tenants.of(GatewaySettings("g", api_keys=str(path)))
    assert tenants is not None
    for headers in (bearer("one"), bearer("two"), [(b"x-api-key", b"one")], [(b"authorization", b"bearer  two ")]):
        assert tenants.identify(headers) == Caller("acme", scoped=True)
    assert tenants.identify(bearer("three")).tenant == "north wind"
    assert tenants.bounds("acme") == TenantBounds(5, 7)
    assert tenants.policy("acme").tokens == TokenBounds(11, 13)
    assert tenants.policy("acme").weight == 2
    assert tenants.lane_weights() == {lane_of("acme"): 2}
    assert tenants.bounds("absent") == TenantBounds()
    for headers in ([], [(b"authorization", b"Basic b25l")], bearer("")):
        with pytest.raises(Unauthenticated, match="an API key is needed"):
            tenants.identify(headers)
    for key in ("four", "One", hashlib.sha256(b"two").hexdigest(), "sha256:" + hashlib.sha256(b"two").hexdigest()):
        with pytest.raises(Unauthenticated, match="not known"):
            tenants.identify(bearer(key))
    assert "one" not in repr(tenants._table)


def test_json_has_the_same_form(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"tenants": {"acme": {"keys": ["one"]}}}))
    assert Tenants("", str(path)).identify(bearer("one")).tenant == "acme"


def test_a_changed_file_counts_and_a_broken_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0]
    monkeypatch.setattr(gateway.access.tenants, "monotonic_ns", lambda: now[0])
    path = tmp_path / "keys.toml"
    write(path, GOOD, 1)
    tenants = Tenants("", str(path))
    tenants.identify(bearer("one"))
    write(path, '[tenants.acme]\nkeys = ["new"]\n', 2)
    tenants.identify(bearer("one"))  # at most one look in a second
    now[0] += 1_000_000_000
    changes = []
    tenants.on_change = lambda: changes.append(tenants.lane_weights())
    with pytest.raises(Unauthenticated):
        tenants.identify(bearer("one"))
    assert changes == [{}]
    assert tenants.identify(bearer("new")).tenant == "acme"
    assert tenants.bounds("acme") == TenantBounds()
    with caplog.at_level(logging.ERROR):
        for stamp, text in ((3, "[tenants"), (3, "[tenants"), (4, "x = 1")):
            write(path, text, stamp)
            now[0] += 1_000_000_000
            assert tenants.identify(bearer("new")).tenant == "acme"
        path.unlink()
        now[0] += 1_000_000_000
        assert tenants.identify(bearer("new")).tenant == "acme"
    assert len(caplog.records) == 3, "each complaint once"
    write(path, GOOD, 5)
    now[0] += 1_000_000_000
    assert tenants.identify(bearer("one")).tenant == "acme"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({}, "must hold one table 'tenants'"),
        ([], "must hold one table 'tenants'"),
        ({"tenants": {}, "more": 1}, "must hold one table 'tenants'"),
        ({"tenants": {"": {}}}, "is no name"),
        ({"tenants": {"a\nb": {}}}, "is no name"),
        ({"tenants": {"a": {"wieght": 1}}}, "and nothing else"),
        ({"tenants": {"a": {"keys": "one"}}}, "'keys' must be a list of texts"),
        ({"tenants": {"a": {"keys": [""]}}}, "'keys' must be a list of texts"),
        ({"tenants": {"a": {"weight": 0}}}, "'weight' must be a whole number"),
        ({"tenants": {"a": {"weight": True}}}, "'weight' must be a whole number"),
        ({"tenants": {"a": {"weight": 1.5}}}, "'weight' must be a whole number"),
        ({"tenants": {"a": {"weight": 101}}}, "'weight' must be a whole number"),
        ({"tenants": {"a": {"max_pending_bytes": -1}}}, "bounds must be whole numbers"),
        ({"tenants": {"a": {"max_pending_requests": 1.5}}}, "bounds must be whole numbers"),
        ({"tenants": {"a": {"keys": ["k"]}, "b": {"keys": ["k"]}}}, "has a key of tenant 'a'"),
    ],
)
def test_what_is_no_table(content: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        table_of(content, "file")
    assert str(caught.value).startswith("file")


@pytest.mark.parametrize("content", [None, "[tenants", "x = 1"])
def test_a_file_that_cannot_be_read_stops_the_start(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StartupError, match=r"^--api-keys: "):
        Tenants("", str(path))
