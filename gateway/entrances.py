"""Admits requests: finds the version that a request is for, and checks the request against it.

What is refused is counted and never enters the log. `service` decides where an admitted request goes: to the response
cache, a wave, the full way or the jobs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from charonia.calls.admission import Admission
from charonia.calls.cache.cache_keys import rules_of
from charonia.calls.unsent_counts import UnsentCounts, failure_reason
from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import SERVER_EXITING, CharoniaError, Unavailable, shed
from charonia.inference import InferenceRequest, check_deadline
from charonia.models.config_errors import InstanceError
from charonia.models.recording_rules import RecordingRules, recording_rules

from .dataplane import AdmittedRequest
from .metrics import GatewayMetrics, RequestCounts
from .releases.version_choice import VersionChoice
from .requests.delivery import AS_USUAL, DeliveryOptions
from .tracing.trace import Trace, failed

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entrance:
    """A served version, its admission check, the counts of its requests, and which of them are recorded."""

    served: ServedVersion
    counts: RequestCounts
    admission: Admission
    recording: RecordingRules | None = None
    """Set when requests of the version are recorded (ADR 0060)."""


class Entrances:
    """The entrances of one gateway. `caches`: it has a response cache."""

    def __init__(self, catalog: Catalog, metrics: GatewayMetrics, unsent: UnsentCounts, *, caches: bool) -> None:
        self._catalog = catalog
        self._metrics = metrics
        self._unsent = unsent
        self._caches = caches
        self._known: dict[tuple[str, int], Entrance] = {}
        self.choice = VersionChoice(catalog)
        self._rules = self.choice.rules
        self.is_draining = False
        """All requests are refused."""

    def admit(
        self,
        request: InferenceRequest,
        started_ns: int,
        options: DeliveryOptions | None = None,
        min_interval_s: float = 0.0,
    ) -> tuple[Entrance, AdmittedRequest]:
        """Admit a request: its entrance and its admitted form. Raises the error that refuses it."""
        if self.is_draining:
            raise Unavailable(SERVER_EXITING)
        served = request.served or self._catalog.find(request.model, request.version)
        fallback = shadow = None
        if request.headers is not None and request.version < 0 and served.model in self._rules:
            served, fallback = self.choice.choose(request, options or AS_USUAL, served)
            shadow = self.choice.shadow_of(request, options or AS_USUAL, served)
            request.served = served
        if isinstance(request.trace, Trace):
            tenant = options.caller.tenant if options is not None else ""
            request.trace.begins(served.interface.name, served.version, request.id, tenant)
        known = self._known.get((served.model, served.version))
        if known is None or known.served is not served:
            known = self._entrance(served, known)
        admission = known.admission
        try:
            if request.deadline_ns:
                check_deadline(request.deadline_ns, wall_ns())
            admitted = admission.admit(request)
            level = admission.level(request.priority)
            one = AdmittedRequest(request, served, admitted, level, options or AS_USUAL, min_interval_s)
            if fallback is not None or shadow is not None:
                one.fallback, one.shadow = fallback, shadow
            return known, one
        except CharoniaError as error:
            if fallback is None:
                # as in Triton, a request that does not fit is not counted as the model's failure
                if failure_reason(error, executed=False) != "OTHER":
                    self._refused(known, started_ns, error)
                if request.trace is not None:
                    failed(request.trace, error)
                raise
            refused = shed(error)  # with its traceback it would be a cycle with this frame, which has the inputs
        request.served, request.headers = fallback, None
        # what the other version refuses too says nothing about a candidate
        again = self.admit(request, started_ns, options, min_interval_s)
        self._refused(known, started_ns, refused)
        self.choice.ran_again(served.model)
        return again

    def _refused(self, entrance: Entrance, started_ns: int, error: CharoniaError) -> None:
        reason = failure_reason(error, executed=False)
        entrance.counts.failures[reason] += 1
        self._unsent.count(entrance.served, monotonic_ns() - started_ns, reason)

    def admit_again(self, one: AdmittedRequest) -> tuple[Entrance, AdmittedRequest] | None:
        """Admit a request that a candidate has failed to the version that its rule would have chosen otherwise, also
        while this gateway drains, for the request was accepted before.

        None if that version refuses it or its deadline has passed: its answer is the failure, and nothing is counted.
        """
        request, served = one.request, one.fallback
        if served is None:
            return None
        known = self.of(served)
        admission = known.admission
        try:
            if request.deadline_ns:
                check_deadline(request.deadline_ns, wall_ns())
            admitted, level = admission.admit(request), admission.level(request.priority)
        except CharoniaError:
            return None
        request.served, request.headers = served, None
        if isinstance(request.trace, Trace):
            request.trace.begins(served.interface.name, served.version, request.id, one.options.caller.tenant)
        self.choice.ran_again(served.model)
        return known, AdmittedRequest(request, served, admitted, level, one.options, one.min_interval_s)

    def of(self, served: ServedVersion) -> Entrance:
        """The entrance of a version."""
        known = self._known.get((served.model, served.version))
        return known if known is not None and known.served is served else self._entrance(served, known)

    def _entrance(self, served: ServedVersion, known: Entrance | None) -> Entrance:
        """Make the entrance; a loaded version with the same content keeps its admission."""
        if known is not None and known.served.content_hash == served.content_hash:
            admission = known.admission
        else:
            admission = Admission(served.interface, served.version, served.content_hash)
            if self._caches:
                admission.caching = rules_of(served)
            elif served.config.response_cache.enable:
                _log.warning(
                    "model '%s' wants its responses cached, but this server has no cache (--cache-config): "
                    "they are not",
                    served.model,
                )
        self._metrics.configure(served)  # whatever its content: its series may have begun again
        key = (served.model, served.version)
        entrance = Entrance(served, self._metrics.counts(*key), admission, _recording(served))
        self._known[key] = entrance
        return entrance


def _recording(served: ServedVersion) -> RecordingRules | None:
    """None also where a release with other rules has loaded the model."""
    try:
        return recording_rules(served.config)
    except InstanceError:
        return None
