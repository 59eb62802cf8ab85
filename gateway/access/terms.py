"""The terms on which a caller's requests are accepted: queue lane, bounds, journal, durability. Pure.

Equal callers have equal terms, so that their requests can share log entries. `tenants` identifies callers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from charonia.calls.entry_packer import Terms
from charonia.errors import InvalidArgument
from charonia.eventlog.port import Limits
from charonia.keys import lane_of
from charonia.options.settings import GatewaySettings
from gateway.requests.delivery import Caller, DeliveryOptions

JOURNAL_ALL = "all"
JOURNAL_OFF = "off"

_DURABILITY = re.compile(r"memory|fsync|replicated:([1-9][0-9]?)")
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class TenantBounds:
    """Bounds of a tenant's unsettled work for one model; 0 = no bound."""

    requests: int = 0
    size_bytes: int = 0


def check_durability(level: str) -> None:
    """Raises `InvalidArgument` for a level that is not memory, fsync or replicated:<1..99>."""
    if not _DURABILITY.fullmatch(level):
        raise InvalidArgument(f"invalid durability '{level[:64]}', expected memory, fsync or replicated:<number>")


class TermsBook:
    """The terms of every caller. `bounds` returns a tenant's current bounds."""

    def __init__(self, settings: GatewaySettings, bounds: Callable[[str], TenantBounds] | None = None) -> None:
        self._settings = settings
        self._bounds = bounds
        self._known: dict[tuple[str, str, TenantBounds], Terms] = {}
        self.default = self._terms("", "", TenantBounds())
        """The terms of a caller without options."""

    def of(self, options: DeliveryOptions) -> Terms:
        """The terms for these options. Raises `InvalidArgument` for an unknown durability."""
        tenant = options.caller.tenant
        if not tenant and not options.durability:
            return self.default
        bounds = self._bounds(tenant) if tenant and self._bounds is not None else TenantBounds()
        key = (tenant, options.durability, bounds)
        found = self._known.get(key)
        if found is None:
            if options.durability:
                check_durability(options.durability)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            found = self._known[key] = self._terms(*key)
        return found

    def shared(self, tenant: str) -> Terms | None:
        """The terms on which a tenant's requests can share waves; None for a tenant with
        bounds of requests or bytes: its requests are counted one by one."""
        terms = self.of(DeliveryOptions(caller=Caller(tenant))) if tenant else self.default
        return None if terms.limits.tenant_requests or terms.limits.tenant_size_bytes else terms

    def _terms(self, tenant: str, durability: str, bounds: TenantBounds) -> Terms:
        settings = self._settings
        limits = Limits(
            settings.max_pending_requests,
            settings.max_pending_bytes,
            bounds.requests,
            bounds.size_bytes,
        )
        return Terms(
            lane_of(tenant), tenant, limits, settings.journal == JOURNAL_ALL, durability or settings.durability
        )
