"""What a log URL says."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

import pytest
from certificates import HAS_OPENSSL, authority, encrypt

from charonia.errors import StartupError
from charonia.eventlog.redis.server.address import parse_address, with_password


def test_a_unix_url_names_a_path_and_a_database() -> None:
    address = parse_address("unix:///run/a%20b/server.sock?db=4")
    assert (address.path, address.database, address.tls) == ("/run/a b/server.sock", 4, None)


def test_a_redis_url_has_the_usual_defaults() -> None:
    address = parse_address("redis://")
    assert (address.host, address.port, address.database, address.username) == ("localhost", 6379, 0, "")
    address = parse_address("redis://[::1]:7000/2")
    assert (address.host, address.port, address.database) == ("::1", 7000, 2)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://log:6379", "not 'http://'"),
        ("log", "as in redis://localhost:6379"),
        ("log:6379", "as in redis://localhost:6379"),
        ("redis://log:6379/jobs", "names the database 'jobs', which is no number"),
        ("redis://log:6379/-1", "names the database '-1', which is no number"),
        ("redis://log:port", "cannot be read: Port"),
    ],
)
def test_a_url_that_is_wrong_is_refused_with_what_it_lacks(url: str, said: str) -> None:
    with pytest.raises(StartupError, match=said):
        parse_address(url)


def test_credentials_are_decoded_and_never_shown() -> None:
    address = parse_address("redis://me:p%40ss%2F@host/1")
    assert (address.username, address.password, address.host) == ("me", "p@ss/", "host")
    assert "p@ss/" not in repr(address)
    assert address.text == "redis://host:6379/1"


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:s/cret@log:6379/1",
        "redis://:s?cret@log",
        "redis://:s#cret@log",
        "redis://:12#cret@log",
        "redis://me:12/cret@log",
        "redis://me:12?cret@log",
        "redis:/me:secret@log",
        "redis://me:s[cret@log",
        "redis://me:scret\N{ACCOUNT OF}@log",
        "redis+sentinel://me:s/cret@log/jobs",
        "redis+sentinel://me:12/cret@log/jobs",
        "redis+cluster://me:s/cret@log",
        "redis+cluster://me:12/cret@log",
        "redis+cluster://me:12?cret@log",
    ],
)
def test_what_is_not_encoded_in_a_password_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(StartupError, match="must be percent-encoded") as refused:
        parse_address(url)
    assert not re.search(r"'s'|cret|12", str(refused.value))


def test_a_certificate_whose_name_has_the_sign_behind_credentials_is_no_password(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"a certificate of the event log URL cannot be loaded: .*No such file"):
        parse_address(f"rediss://me:secret@log?ssl_ca_certs={tmp_path}/ours@none.crt")


@pytest.mark.skipif(not HAS_OPENSSL, reason="openssl makes the key")
def test_a_key_with_a_passphrase_is_refused_and_nobody_asked(tmp_path: Path) -> None:
    authority(tmp_path, "ours")
    encrypt(tmp_path / "ours.key")
    with pytest.raises(StartupError, match=r"cannot be loaded: the key has a passphrase, which is not asked for"):
        parse_address(f"rediss://log?ssl_certfile={tmp_path}/ours.crt&ssl_keyfile={tmp_path}/ours.key")


def test_a_socket_may_have_the_sign_behind_credentials_in_its_name() -> None:
    assert parse_address("unix:///run/valkey@log.sock").path == "/run/valkey@log.sock"


def test_tls_checks_the_server_unless_told_not_to() -> None:
    strict = parse_address("rediss://host").tls
    assert strict is not None
    assert strict.verify_mode is ssl.CERT_REQUIRED
    loose = parse_address("rediss://host?ssl_cert_reqs=none").tls
    assert loose is not None
    assert loose.verify_mode is ssl.CERT_NONE


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("redis://redis:6379/0", "redis://:p%40ss%2F@redis:6379/0"),
        ("rediss://me@redis", "rediss://me:p%40ss%2F@redis"),
        ("unix:///run/log", "unix://:p%40ss%2F@/run/log"),
    ],
)
def test_a_password_comes_from_a_file(url: str, wanted: str, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("p@ss/\n")
    assert with_password(url, str(tmp_path / "password")) == wanted
    assert parse_address(wanted).password == "p@ss/"
    assert with_password(url, "") == url


def test_a_password_file_that_is_of_no_use_is_said(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read: No such file"):
        with_password("redis://redis", str(tmp_path / "none"))
    with pytest.raises(StartupError, match=r"^--blob-password-file: "):
        with_password("redis://redis", str(tmp_path / "none"), "--blob-password-file")
    (tmp_path / "password").write_text("x")
    with pytest.raises(StartupError, match="holds a password already"):
        with_password("redis://:y@redis", str(tmp_path / "password"))
