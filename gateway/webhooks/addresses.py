"""The URLs that a webhook may have, and the addresses that a sender may connect to. Pure.

One strict parser reads URLs, and the sender connects to its result, so that no second parser can read them differently.
`Allowed.permits` checks the addresses that a name resolves to, and the connection is made to the checked address.
`gateway.webhooks.posting` resolves and connects.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from charonia.errors import InvalidArgument, StartupError

MAX_URL_LENGTH = 2048

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_URL = re.compile(
    r"(?P<scheme>https?)://"
    r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.~-]+)"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<target>(?:/[^?#]*)?(?:\?[^#]*)?)",
    re.IGNORECASE,
)
_PLAIN = re.compile(r"[!-~]*")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORTS = {"http": 80, "https": 443}

_REFUSED_V4 = [
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this network, the unspecified address
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local: the metadata services of clouds
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
]
"""All networks in the IANA registry of special-purpose IPv4 addresses."""

_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
"""The only part of IPv6 that is globally routed. Outside: loopback, link-local, unique local, multicast, IPv4-mapped
and -compatible addresses and NAT64, all of which may lead to an internal address.
"""

_REFUSED_V6 = [
    ipaddress.IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4 holds an IPv4 address
        "2620:4f:8000::/48",
        "3fff::/20",  # documentation
    )
]


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet, by its number."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _REFUSED_V4)
    if address.scope_id is not None:
        return False
    return address in _GLOBAL_V6 and not any(address in network for network in _REFUSED_V6)


class Allowed:
    """Networks and host names that an operator allows beside public addresses."""

    def __init__(self, networks: Iterable[_Network] = (), hosts: Iterable[str] = ()) -> None:
        self._networks = tuple(networks)
        self._hosts = frozenset(hosts)

    @classmethod
    def parse(cls, entries: Sequence[str]) -> Allowed:
        """From values of `--webhook-allow`: CIDR, address or host name. Raises `StartupError`."""
        networks: list[_Network] = []
        hosts: list[str] = []
        for entry in entries:
            try:
                networks.append(ipaddress.ip_network(entry))
                continue
            except ValueError as error:
                if "/" in entry:
                    raise StartupError(f"--webhook-allow '{entry}' is no network: {error}") from None
            name = entry.lower().rstrip(".")
            if not _is_name(name):
                raise StartupError(f"--webhook-allow must be a network, an address or a host name, got '{entry}'")
            hosts.append(name)
        return cls(networks, hosts)

    def permits(self, host: str, address: Address) -> bool:
        """Whether a webhook at `host` may be called at `address`, to which it resolves."""
        return host in self._hosts or self._lists(address) or is_public(address)

    def names(self, host: str) -> bool:
        """Whether the operator has listed this host by name."""
        return host in self._hosts

    def _lists(self, address: Address) -> bool:
        if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
            return False
        return any(address.version == network.version and address in network for network in self._networks)


PUBLIC_ONLY = Allowed()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint of a webhook. `host` is lower case, without brackets; `target` is path and query, as written."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def address(self) -> Address | None:
        """The host, if it is an address."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def authority(self) -> str:
        """The `Host` header, with a port that is not the scheme's default."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def name(self) -> str:
        """Host and port: the unit whose concurrent calls are bounded."""
        return f"{self.host}:{self.port}"


def parse_url(url: str) -> Endpoint:
    """The endpoint of a URL, whatever its address. Raises `InvalidArgument`."""
    if len(url) > MAX_URL_LENGTH:
        raise InvalidArgument(f"webhook url is longer than {MAX_URL_LENGTH} characters")
    if not _PLAIN.fullmatch(url):
        raise InvalidArgument("webhook url holds characters that must be percent-encoded")
    match = _URL.fullmatch(url)
    if match is None:
        raise InvalidArgument(_why(url))
    scheme, host = match["scheme"].lower(), match["host"].lower()
    port = int(match["port"]) if match["port"] else _PORTS[scheme]
    if not 1 <= port <= 65535:
        raise InvalidArgument(f"webhook url has port {port}")
    target = match["target"]
    if not target.startswith("/"):
        target = "/" + target
    if host.startswith("["):
        try:
            return Endpoint(scheme, str(ipaddress.IPv6Address(host[1:-1])), port, target)
        except ValueError:
            raise InvalidArgument(f"webhook url has no valid host: '{host}'") from None
    if _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):
        # resolvers also accept 127.1, 0x7f000001 and 2130706433 as addresses; here only the dotted form is one
        try:
            return Endpoint(scheme, str(ipaddress.IPv4Address(host)), port, target)
        except ValueError:
            raise InvalidArgument(f"webhook url has no valid host: '{host}'") from None
    host = host.removesuffix(".")
    if not _is_name(host):
        raise InvalidArgument(f"webhook url has no valid host: '{host}'")
    return Endpoint(scheme, host, port, target)


def check_url(url: object, allowed: Allowed = PUBLIC_ONLY) -> Endpoint:
    """Parse the URL of a webhook, and refuse one that can never be called.

    The addresses of a name are checked when it is called, not here. Raises `InvalidArgument`.
    """
    if not isinstance(url, str):
        raise InvalidArgument("webhook url must be a string")
    endpoint = parse_url(url)
    address = endpoint.address
    if address is not None:
        refused = not allowed.permits(endpoint.host, address)
    else:
        loopback = endpoint.host == "localhost" or endpoint.host.endswith(".localhost")
        refused = loopback and not allowed.names(endpoint.host) and not _loopback_listed(allowed)
    if refused:
        raise InvalidArgument(f"webhook url names an address that webhooks may not reach: '{endpoint.host}'")
    return endpoint


def _loopback_listed(allowed: Allowed) -> bool:
    return any(
        allowed.permits("", address) for address in (ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1"))
    )


def _is_name(host: str) -> bool:
    return len(host) <= 253 and all(_LABEL.fullmatch(label) for label in host.split("."))


def _why(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() not in _PORTS:
        return "webhook url must start with http:// or https://"
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in authority:
        return "webhook url must not hold a user name or password"
    if "#" in rest:
        return "webhook url must not have a fragment"
    return f"webhook url has no valid host: '{authority}'"
