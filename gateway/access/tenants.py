"""Who calls: the tenant a trusted proxy names (`--tenant-header`) or an API key stands for (`--api-keys`).

The file is TOML, or JSON when its name ends so; it is read again when it changes, and kept as it was while it cannot
be read:

    [tenants.acme]
    keys = ["a secret", "sha256:<64 hex digits>"]
    max_pending_requests = 1000     # of one model, unsettled; 0 or absent for no bound
    max_pending_bytes = 100000000
    max_pending_tokens = 50000      # of the texts of one model that a gateway runs for it, prompts and answers
    max_text_tokens = 4000          # of one text, prompt and answer
    weight = 2                      # its share beside other tenants of a priority level, 1 to 100

Only digests of the keys stay in memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from charonia.clock import monotonic_ns
from charonia.errors import StartupError, Unauthenticated
from charonia.keys import lane_of
from charonia.options.settings import GatewaySettings
from gateway.requests.delivery import Caller

from .restrictions import RawHeaders
from .terms import TenantBounds
from .token_bounds import NO_BOUNDS, TokenBounds

_log = logging.getLogger(__name__)

MAX_TENANT_BYTES = 128
MAX_WEIGHT = 100
_TENANT = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
LOOK_INTERVAL_S = 0.5
"""Half of the second that the tenants' page promises: a check just before the interval ends is skipped, so a change may
take two intervals."""
_LOOK_INTERVAL_NS = int(LOOK_INTERVAL_S * 1e9)
_BOUNDS = ("max_pending_requests", "max_pending_bytes", "max_text_tokens", "max_pending_tokens")
_FIELDS = frozenset(("keys", "weight", *_BOUNDS))

KEY_NEEDED = "an API key is needed: 'Authorization: Bearer <key>' or 'x-api-key: <key>'"
KEY_UNKNOWN = "the API key is not known"


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """Bounds and weight of one tenant."""

    weight: int = 1
    bounds: TenantBounds = field(default_factory=TenantBounds)
    tokens: TokenBounds = NO_BOUNDS


@dataclass(frozen=True, slots=True)
class TenantTable:
    """The content of the file: policies by tenant, tenants by the SHA-256 of their keys."""

    policies: Mapping[str, TenantPolicy]
    by_key: Mapping[bytes, str]


class Tenants:
    """Identifies callers. Exactly one of `header` and `path` is set."""

    def __init__(self, header: str, path: str) -> None:
        self._header = header.lower().encode("latin-1")
        self._path = Path(path) if path else None
        self._table = TenantTable({}, {})
        self._stamp: tuple[int, int, int] | None = None
        self._complained = ""
        self._look_after_ns = 0
        self.on_change: Callable[[], None] = lambda: None
        """Called in the event loop after the file was read again."""
        if self._path is not None:
            try:
                self._stamp = _stamp(self._path)
                self._table = read_table(self._path)
            except (OSError, ValueError) as error:
                raise StartupError(f"--api-keys: {_reason(error)}") from None

    @staticmethod
    def of(settings: GatewaySettings) -> Tenants | None:
        """None if tenants are not configured. Raises `StartupError`."""
        if settings.tenant_header and settings.api_keys:
            raise StartupError("--tenant-header and --api-keys both say who calls: give one of them")
        if not settings.tenant_header and not settings.api_keys:
            return None
        if settings.tenant_header and not _HEADER_NAME.fullmatch(settings.tenant_header):
            raise StartupError(f"--tenant-header must be the name of a header, got '{settings.tenant_header}'")
        return Tenants(settings.tenant_header, settings.api_keys)

    def identify(self, headers: RawHeaders) -> Caller:
        """The caller of a request; names of `headers` are in lower case. Raises `Unauthenticated`."""
        return self._by_key(headers) if self._path is not None else self._by_header(headers)

    def bounds(self, tenant: str) -> TenantBounds:
        return self.policy(tenant).bounds

    def policy(self, tenant: str) -> TenantPolicy:
        return self._table.policies.get(tenant, _DEFAULT)

    def lane_weights(self) -> dict[int, int]:
        """The lanes with a weight above 1; of tenants that share a lane the highest weight counts."""
        weights: dict[int, int] = {}
        for tenant, policy in self._table.policies.items():
            if policy.weight > 1:
                lane = lane_of(tenant)
                weights[lane] = max(policy.weight, weights.get(lane, 1))
        return weights

    def _by_header(self, headers: RawHeaders) -> Caller:
        given = {value for name, value in headers if name == self._header}
        if not given:
            return Caller("", scoped=True)  # of no tenant: no bounds hold, and it sees only jobs without a tenant
        # two names: the client has added one to the proxy's
        tenant = given.pop().decode("latin-1").strip()
        if given or not is_tenant_name(tenant):
            raise Unauthenticated(f"header '{self._header.decode('latin-1')}' does not name one tenant")
        return Caller(tenant, scoped=True)

    def _by_key(self, headers: RawHeaders) -> Caller:
        self.look()
        key = b""
        for name, value in headers:
            if name == b"x-api-key":
                key = value
                break
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                key = value[7:].strip()
        if not key:
            raise Unauthenticated(KEY_NEEDED)
        # a lookup by digest reveals nothing about the key by its duration
        tenant = self._table.by_key.get(hashlib.sha256(key).digest())
        if tenant is None:
            raise Unauthenticated(KEY_UNKNOWN)
        return Caller(tenant, scoped=True)

    def look(self) -> None:
        """Read the file again if it has changed; checks at most once per `LOOK_INTERVAL_S`."""
        now_ns = monotonic_ns()
        if now_ns < self._look_after_ns or self._path is None:
            return
        self._look_after_ns = now_ns + _LOOK_INTERVAL_NS
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._table = read_table(self._path)
            self._stamp = stamp
            self._complained = ""
            self.on_change()
            _log.info("API keys of %d tenants read from %s", len(self._table.policies), self._path)
        except (OSError, ValueError) as error:
            reason = _reason(error)
            if reason != self._complained:
                self._complained = reason
                _log.error("API keys are kept as they were: %s", reason)


_DEFAULT = TenantPolicy()


def is_tenant_name(name: str) -> bool:
    """Whether a name is printable ASCII, not empty, and at most `MAX_TENANT_BYTES` long."""
    return len(name) <= MAX_TENANT_BYTES and _TENANT.fullmatch(name) is not None


def read_table(path: Path) -> TenantTable:
    """The table in a file. Raises `OSError`, and `ValueError` with a sentence for other content."""
    data = path.read_bytes()
    try:
        content = json.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return table_of(content, str(path))


def table_of(content: Any, where: str) -> TenantTable:
    """The table of decoded content. Raises `ValueError`."""
    tenants = content.get("tenants") if isinstance(content, dict) else None
    if not isinstance(tenants, dict) or set(content) != {"tenants"}:
        raise ValueError(f"{where} must hold one table 'tenants'")
    policies: dict[str, TenantPolicy] = {}
    by_key: dict[bytes, str] = {}
    for name, entry in tenants.items():
        here = f"{where}: tenant '{name}'"
        if not is_tenant_name(name):
            raise ValueError(f"{here} is no name of 1 to {MAX_TENANT_BYTES} printable ASCII characters")
        if not isinstance(entry, dict) or not set(entry) <= _FIELDS:
            raise ValueError(f"{here} may hold {', '.join(sorted(_FIELDS))} and nothing else")
        policies[name] = _policy(entry, here)
        keys = entry.get("keys", [])
        if not isinstance(keys, list) or not all(isinstance(key, str) and key for key in keys):
            raise ValueError(f"{here}: 'keys' must be a list of texts")
        for key in keys:
            match = _DIGEST.fullmatch(key)
            digest = bytes.fromhex(match[1]) if match else hashlib.sha256(key.encode()).digest()
            if by_key.setdefault(digest, name) != name:
                raise ValueError(f"{here} has a key of tenant '{by_key[digest]}'")
    return TenantTable(policies, by_key)


def _policy(entry: Mapping[str, Any], here: str) -> TenantPolicy:
    weight = entry.get("weight", 1)
    if type(weight) is not int or not 1 <= weight <= MAX_WEIGHT:
        raise ValueError(f"{here}: 'weight' must be a whole number between 1 and {MAX_WEIGHT}")
    numbers = [entry.get(field, 0) for field in _BOUNDS]
    if not all(type(number) is int and 0 <= number < 2**53 for number in numbers):
        raise ValueError(f"{here}: bounds must be whole numbers, 0 for none")
    return TenantPolicy(weight, TenantBounds(*numbers[:2]), TokenBounds(*numbers[2:]))


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _reason(error: OSError | ValueError) -> str:
    return f"{error.filename} cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
