"""Chooses the version of a request that names none, by the routing rule of its model.

`charonia.releases.route_rule` has the rules and decides; here are the parts of a request that it asks for. Only models
with a rule come here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.errors import CharoniaError, ErrorCode
from charonia.inference import InferenceRequest
from charonia.releases.route_rule import RequestFacts, RouteRule, chosen, spread_draw, sticky_draw, sticky_key
from gateway.requests.delivery import DeliveryOptions, is_job

Headers = Iterable[tuple[bytes, bytes]]
"""Names in lower case, with their values."""

_FINAL = frozenset({ErrorCode.CANCELLED, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.UNAUTHENTICATED})


class VersionChoice:
    """The choices of one gateway; `rules` are those of its catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.rules: Mapping[str, RouteRule] = catalog.routes.rules
        self._numbers: dict[str, int] = {}
        """By model: how many draws were made without a key."""
        self.reruns: dict[str, int] = {}
        """By model: requests that a candidate failed, and that the present version was asked to answer."""

    def shadow_of(
        self, request: InferenceRequest, options: DeliveryOptions, chosen: ServedVersion
    ) -> ServedVersion | None:
        """The version that gets a copy, None for none: so for sequences, streams, jobs and inputs in shared memory."""
        version = self.rules[chosen.model].shadow
        if not version or version == chosen.version or request.sequence_id or request.regions is not None:
            return None
        if chosen.interface.decoupled or is_job(options) or options.respond_async:
            return None
        shadow = self._catalog.served(chosen.model).get(version)
        return None if shadow is None or shadow.interface.decoupled else shadow

    def choose(
        self, request: InferenceRequest, options: DeliveryOptions, found: ServedVersion
    ) -> tuple[ServedVersion, ServedVersion | None]:
        """The version for a request, and the one to run it again on if that fails: None where it cannot be hidden.

        `found` is what `Catalog.find` gives. A version that is not served gets none, nor does one that is decoupled
        where `found` is not: the call of the caller is for the one or the other.
        """
        model = found.model
        rule = self.rules[model]
        is_bound = bool(request.sequence_id) or found.interface.decoupled or is_job(options) or options.respond_async
        facts = RequestFacts(request.headers or (), options.caller.tenant, request.sequence_id, is_bound)
        key = sticky_key(rule, facts)
        if key:
            draw = sticky_draw(model, key)
        else:
            number = self._numbers.get(model, 0)
            self._numbers[model] = number + 1
            draw = spread_draw(number)
        version = chosen(rule, facts, draw)
        if version == found.version:
            return found, None
        served = self._catalog.served(model).get(version)
        if served is None or served.interface.decoupled != found.interface.decoupled:
            return found, None
        return served, None if is_bound or version == rule.present else found

    def named(self, found: ServedVersion, headers: Headers, tenant: str) -> ServedVersion:
        """The version for callers who send no single request: the candidate if a header or the tenant names it, else
        `found`. No share is drawn for them.
        """
        rule = self.rules.get(found.model)
        if rule is None:
            return found
        version = chosen(rule, RequestFacts(headers, tenant, is_bound=True), 0)
        served = self._catalog.served(found.model).get(version)
        return found if served is None or served.interface.decoupled != found.interface.decoupled else served

    def ran_again(self, model: str) -> None:
        """Count a request that a candidate has failed and that goes to the present version."""
        self.reruns[model] = self.reruns.get(model, 0) + 1


def may_run_again(error: CharoniaError) -> bool:
    """Whether a request that a candidate failed with this error is run again."""
    return error.code not in _FINAL
