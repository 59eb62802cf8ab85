"""What a busy host is given, and when the rest of its webhooks come back."""

from __future__ import annotations

import pytest

from charonia.clock import wall_ns
from gateway.webhooks.addresses import parse_url
from gateway.webhooks.loads import DIGEST_BYTES, Loads, digest_of_host


def test_a_host_is_its_name_and_port_whatever_the_path() -> None:
    assert digest_of_host(parse_url("http://a.org/x")) == digest_of_host(parse_url("http://A.org:80/y?z"))
    assert digest_of_host(parse_url("http://a.org/x")) != digest_of_host(parse_url("https://a.org/x"))
    assert len(digest_of_host(parse_url("http://a.org"))) == DIGEST_BYTES


def test_what_is_put_off_comes_back_at_the_pace_of_the_host() -> None:
    host = Loads(concurrency=2).get(b"a")
    for _ in range(100):
        host.took(10.0)
    now_us = wall_ns() // 1000
    times_s = [(host.postponed_us() - now_us) / 1e6 for _ in range(1000)]
    assert times_s == sorted(times_s)
    assert 2 < times_s[1] - times_s[0] <= 2.501
    passed_s = wall_ns() / 1e9 - now_us / 1e6
    assert times_s[-1] <= 601 + passed_s  # a host that recovers is found out soon


def test_calls_are_slow_at_a_host_that_tenants_share_if_they_take_long() -> None:
    loads = Loads(4)
    one, other = b"h" * 8 + b"a" * 8, b"h" * 8 + b"b" * 8
    for _ in range(3):
        loads.get(one).took(15.0)
    assert not loads.is_slow(one), "no other tenant is kept waiting"
    loads.get(other)
    assert loads.is_slow(one)
    assert not loads.is_slow(other), "what is not known is quick"
    for _ in range(20):
        loads.get(one).took(0.01)
    assert not loads.is_slow(one)


def test_a_host_is_no_longer_shared_when_its_tenants_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.webhooks.loads._REMEMBERED", 2)
    loads = Loads(4)
    one = b"h" * 8 + b"a" * 8
    loads.get(one).took(15.0)
    loads.get(one).held = 1
    loads.get(b"h" * 8 + b"b" * 8)
    assert loads.is_slow(one)
    loads.get(b"i" * 8 + b"b" * 8)
    assert not loads.is_slow(one)


def test_hosts_that_rest_are_forgotten_and_those_at_work_are_not() -> None:
    hosts = Loads(concurrency=2)
    busy = hosts.get(b"busy")
    busy.held = 1
    for n in range(5000):
        hosts.get(n.to_bytes(4, "big"))
    assert hosts.get(b"busy") is busy
    assert len(hosts._loads) <= 4097
