"""What a log URL says."""

from __future__ import annotations

import ssl

from charonia.eventlog.redis.address import parse_address


def test_a_unix_url_names_a_path_and_a_database() -> None:
    address = parse_address("unix:///run/a%20b/server.sock?db=4")
    assert (address.path, address.database, address.tls) == ("/run/a b/server.sock", 4, None)


def test_a_redis_url_has_the_usual_defaults() -> None:
    address = parse_address("redis://")
    assert (address.host, address.port, address.database, address.username) == ("localhost", 6379, 0, "")
    address = parse_address("redis://[::1]:7000/2")
    assert (address.host, address.port, address.database) == ("::1", 7000, 2)


def test_credentials_are_decoded_and_never_shown() -> None:
    address = parse_address("redis://me:p%40ss%2F@host/1")
    assert (address.username, address.password, address.host) == ("me", "p@ss/", "host")
    assert "p@ss/" not in repr(address)
    assert address.text == "redis://host:6379/1"


def test_tls_checks_the_server_unless_told_not_to() -> None:
    strict = parse_address("rediss://host").tls
    assert strict is not None
    assert strict.verify_mode is ssl.CERT_REQUIRED
    loose = parse_address("rediss://host?ssl_cert_reqs=none").tls
    assert loose is not None
    assert loose.verify_mode is ssl.CERT_NONE
