"""Which webhook URLs are taken and which addresses may be called."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.errors import InvalidArgument, StartupError
from gateway.webhooks.addresses import (
    PUBLIC_ONLY,
    Allowed,
    Endpoint,
    check_url,
    is_public,
    parse_url,
)

PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.216.34", "172.15.255.255", "172.32.0.0", "2606:4700::1111", "2a00:1450::1"]

REFUSED = [
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "127.0.0.1", "127.255.255.255", "169.254.169.254", "172.16.0.1"),
    *("172.31.255.255", "192.0.0.8", "192.0.2.1", "192.168.1.1", "198.18.0.1", "198.51.100.7", "203.0.113.9"),
    *("224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255", "192.88.99.1"),
    *("::", "::1", "fe80::1", "fec0::1", "fc00::1", "fd12::1", "ff02::1", "100::1", "2001:db8::1", "2001::1"),
    *("::ffff:8.8.8.8", "::ffff:127.0.0.1", "::8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::8.8.8.8"),
    *("64:ff9b:1::1", "2002:7f00:1::", "2001:0:7f00:1::1", "3fff::1", "5f00::1", "4000::1"),
]


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_may_be_called(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", REFUSED)
def test_other_addresses_may_not(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


def test_a_scoped_address_is_never_called() -> None:
    scoped = ipaddress.ip_address("2606:4700::1111%eth0")
    assert not Allowed.parse(["::/0"]).permits("2606:4700::1111", scoped)


@given(st.ip_addresses())
def test_what_python_knows_to_be_special_is_refused(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    special = (
        address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address.is_reserved
    )
    if special:
        assert not is_public(address)


@given(st.ip_addresses(v=4))
def test_no_embedding_of_an_ipv4_address_is_public(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    for prefix, shift in (("::ffff:0:0", 0), ("::", 0), ("64:ff9b::", 0), ("2002::", 80)):
        embedded = ipaddress.IPv6Address(int(ipaddress.IPv6Address(prefix)) | number << shift)
        assert not is_public(embedded)


@given(st.ip_addresses())
def test_a_literal_address_is_judged_by_its_number(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    host = f"[{address}]" if address.version == 6 else str(address)
    endpoint = parse_url(f"http://{host}/")
    assert endpoint.address == address
    if is_public(address):
        check_url(f"https://{host}:8443/hook")
    else:
        with pytest.raises(InvalidArgument, match="may not reach"):
            check_url(f"https://{host}:8443/hook")


@pytest.mark.parametrize(
    ("url", "endpoint", "authority"),
    [
        ("https://example.org", Endpoint("https", "example.org", 443, "/"), "example.org"),
        ("HTTPS://Example.ORG./a%20b?c=d", Endpoint("https", "example.org", 443, "/a%20b?c=d"), "example.org"),
        ("http://example.org:8080?x", Endpoint("http", "example.org", 8080, "/?x"), "example.org:8080"),
        ("http://example.org:443/", Endpoint("http", "example.org", 443, "/"), "example.org:443"),
        ("http://[2606:4700:0::1111]:80/", Endpoint("http", "2606:4700::1111", 80, "/"), "[2606:4700::1111]"),
        ("http://8.8.8.8/", Endpoint("http", "8.8.8.8", 80, "/"), "8.8.8.8"),
        ("http://a_b.example-1.org/@/:x", Endpoint("http", "a_b.example-1.org", 80, "/@/:x"), "a_b.example-1.org"),
    ],
)
def test_a_url_is_an_endpoint(url: str, endpoint: Endpoint, authority: str) -> None:
    assert check_url(url) == endpoint
    assert endpoint.authority == authority


@pytest.mark.parametrize(
    "url",
    [
        *("", "example.org", "//example.org/", "file:///etc/passwd", "gopher://example.org/", "ftp://example.org/"),
        *(
            "http://",
            "http:///x",
            "http:/example.org",
            "http://:80/",
            "http://example.org:0/",
            "http://example.org:65536/",
        ),
        *("http://example.org:80:80/", "http://user@example.org/", "http://a:b@example.org/", "http://example.org#x"),
        *("http://8.8.8.8@127.0.0.1/", "http://example.org\\@127.0.0.1/", "http://example.org/\r\nX: y"),
        *(
            "http://exämple.org/",
            "http://example.org/ ",
            "http://exa mple.org/",
            "http://example..org/",
            "http://-a.org/",
        ),
        *("http://2130706433/", "http://0x7f000001/", "http://0177.0.0.1/", "http://127.1/", "http://1.2.3.4.5/"),
        *("http://127.0.0.1./", "http://0x/", "http://a.0x7f/", "http://256.1.1.1/", "http://[fe80::1%25eth0]/"),
        *("http://[::1/", "http://::1/", "http://[127.0.0.1]/", "http://" + "a" * 64 + ".org/"),
        *("http://example.org/" + "a" * 2048, "http://127.0.0.1/", "http://localhost/", "http://x.localhost:81/"),
        *("http://169.254.169.254/latest/meta-data/", "http://[::ffff:169.254.169.254]/", "http://[::]/"),
        *(None, 7, b"http://example.org/", ["http://example.org/"]),
    ],
)
def test_a_url_that_could_never_be_called_is_refused(url: object) -> None:
    with pytest.raises(InvalidArgument, match=r"^webhook url"):
        check_url(url)


@given(st.text(max_size=40), st.sampled_from(["", "http://", "https://", "http://a.org", "http://["]))
def test_any_text_is_an_endpoint_or_refused(text: str, prefix: str) -> None:
    try:
        endpoint = check_url(prefix + text)
    except InvalidArgument:
        return
    line = f"POST {endpoint.target} HTTP/1.1\r\nHost: {endpoint.authority}\r\n"
    assert line.isascii()
    assert line.count("\n") == 2
    assert endpoint.target.startswith("/")
    assert " " not in endpoint.target + endpoint.authority


def test_an_operator_may_allow_networks_and_hosts() -> None:
    allowed = Allowed.parse(["127.0.0.1/32", "fd00::/8", "Hooks.Internal.", "10.1.2.3"])
    check_url("http://127.0.0.1:9000/", allowed)
    check_url("http://localhost:9000/", allowed)
    check_url("http://10.1.2.3/", allowed)
    check_url("http://[fd00::1]/", allowed)
    for url in ("http://127.0.0.2/", "http://10.1.2.4/", "http://[::ffff:127.0.0.1]/", "http://[::1]/"):
        with pytest.raises(InvalidArgument):
            check_url(url, allowed)
    inside = ipaddress.ip_address("10.9.9.9")
    assert allowed.permits("hooks.internal", inside)
    assert not allowed.permits("other.internal", inside)
    assert not PUBLIC_ONLY.permits("hooks.internal", inside)


@pytest.mark.parametrize("entry", ["10.0.0.0/33", "10.0.0.1/8", "a/b", "", "a b", "http://x", "*"])
def test_what_is_no_network_and_no_host_is_refused_at_start(entry: str) -> None:
    with pytest.raises(StartupError, match="--webhook-allow"):
        Allowed.parse([entry])
