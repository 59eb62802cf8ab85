"""Changing routing rules through the control facts: write the rule, then wait until it is the one that counts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from charonia.catalog.catalog import Catalog
from charonia.clock import wall_ns
from charonia.errors import LogUnavailable, NotFound
from charonia.facts.events import RouteChanged
from charonia.models.names import name_of
from charonia.releases.route_change import changed_rule
from charonia.releases.route_rule import RouteRule, route_fact

_MAX_WAIT_S = 30.0


class Control(Protocol):
    """Reads and writes control facts (`charonia.eventlog.control.ControlPlane`)."""

    catalog: Catalog

    async def announce(self, fact: RouteChanged) -> None: ...

    async def changed(self) -> None: ...


class RouteControl:
    """Changes of rules by one process."""

    def __init__(self, control: Control) -> None:
        self._control = control

    async def change(self, name: str, wanted: Mapping[str, Any] | None) -> RouteRule | None:
        """Change a model's rule by what is `wanted` (`changed_rule`), None to take it away; returns the rule that
        counts.

        If another writer is first, the change is made to that one's rule. Raises `NotFound` for a model that no
        executor has, `InvalidArgument`, and `LogUnavailable` when the change is not read back in time.
        """
        catalog = self._control.catalog
        model = catalog.resolve(name)
        routes = catalog.routes
        if model not in routes.rules and not any(row.model == model for row in catalog.index()):
            raise NotFound(f"Request for unknown model: '{name_of(model)}' is not found")
        while True:
            revision = routes.next_revision(model)
            before = routes.rules.get(model)
            rule = None
            if wanted is not None:
                rule = changed_rule(before, wanted, list(catalog.served(model)), wall_ns() // 1000)
            elif before is None:
                return None
            await self._control.announce(route_fact(model, revision, rule))
            try:
                async with asyncio.timeout(_MAX_WAIT_S):
                    while routes.revisions.get(model, 0) < revision:
                        await self._control.changed()
            except TimeoutError:
                raise LogUnavailable("the change of the routing rule was written and is not read back yet") from None
            counting = routes.rules.get(model)
            if counting == rule:
                return counting
            if counting is None:
                continue
            if rule is not None and rule.history[-1] in counting.history:
                return counting  # another writer has built on ours
            if rule is None and before is not None and before.history and before.history[-1] not in counting.history:
                return counting  # another writer has made it since, from none
