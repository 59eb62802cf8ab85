"""Implements `gateway.handler.Handler` over the catalog and the log.

Joins admission, response cache, waves, the full way, jobs, routing rules, shadows and recordings, tenants, shared
memory, control plane and statistics; it knows no protocol and no socket.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from charonia import keys
from charonia.calls.cache.cache_keys import is_cachable
from charonia.calls.cache.response_cache import ResponseCache
from charonia.calls.model_control import ModelControl
from charonia.calls.payload_transfer import Payloads
from charonia.calls.route_control import RouteControl
from charonia.calls.unsent_counts import UnsentCounts, failure_reason
from charonia.catalog.catalog import ServedVersion
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import SERVER_EXITING, CharoniaError, InvalidArgument, Unavailable, shed
from charonia.eventlog.control import ControlPlane
from charonia.eventlog.payloads import PayloadDirectory
from charonia.eventlog.port import EventLog
from charonia.facts.events import LanesWeighed
from charonia.inference import LATEST_VERSION, InferenceRequest, InferenceResponse, parse_version, wanted_outputs
from charonia.models.ensemble import ENSEMBLE_SCHEDULING
from charonia.models.names import name_of
from charonia.offload.pool import Offload
from charonia.options.settings import EXTENSIONS, SERVER_VERSION, GatewaySettings
from charonia.releases.route_rule import RouteRule, without_values
from charonia.tensors import Buffer
from charonia.wire import ResponseRecord

from .access.restrictions import RawHeaders
from .access.tenants import LOOK_INTERVAL_S, Tenants
from .access.terms import TermsBook
from .access.token_bounds import NO_BOUNDS, TokenBounds
from .dataplane import AdmittedRequest, DataPlane
from .entrances import Entrance, Entrances
from .handler import (
    ModelIndexEntry,
    ModelMetadata,
    ModelStatistics,
    ServerMetadata,
)
from .jobs.jobs import Jobs
from .lane.doors import Awaited, Doors
from .lane.wave_statistics import WaveStatistics
from .metrics import GatewayMetrics, OpenStreams
from .regions.client_regions import ClientRegions, DeliveredInRegions
from .releases.release_watch import ReleaseWatch, release_metrics
from .releases.request_recorder import RequestRecorder
from .releases.shadow_requests import ShadowRequests
from .releases.version_choice import may_run_again
from .reports.metadata import metadata_of
from .reports.model_statistics import model_statistics
from .reports.readiness import Readiness
from .requests.delivery import (
    ANYONE,
    AS_USUAL,
    Caller,
    DeliveryOptions,
    JobReceipt,
    asks_nothing_more,
    is_job,
)
from .requests.large_tensors import check_elements
from .tracing.trace import answered, left, reported
from .tracing.trace import failed as trace_failed
from .tracing.tracer import Tracer
from .tracing.writer import TraceWriter

if TYPE_CHECKING:
    from protos.model_config_pb2 import ModelConfig


_Answer = TypeVar("_Answer")
_ROUTES_ARE_FIXED = (
    "routing rules are changed here with --model-control-mode=explicit alone; 'charonia route' changes them in every "
    "mode"
)


class GatewayService:
    """The handler of one gateway. Call `start` first; `begin_drain`, `drained` and `close` at the end."""

    def __init__(
        self,
        log: EventLog,
        control: ControlPlane,
        settings: GatewaySettings,
        directory: PayloadDirectory | None = None,
        cache_log: EventLog | None = None,
        traces: TraceWriter | None = None,
    ) -> None:
        self._log = log
        self._control = control
        self.offload = Offload()
        self._catalog = control.catalog
        self._settings = settings
        self._tenants = Tenants.of(settings)
        self.identifies = self._tenants is not None
        terms = TermsBook(settings, self._tenants.bounds if self._tenants is not None else None)
        self.payloads: Payloads | None = None
        if directory is not None:
            self.payloads = Payloads(log, directory, self._catalog.processes, settings.incarnation)
        self._dataplane = DataPlane(log, settings, terms, self.payloads)
        self.regions = ClientRegions(
            allowed=settings.allow_client_shm, directory=settings.shm_dir, allocate=self.allocate_body
        )
        self.tracer = Tracer(settings.tracing, control, log, traces)
        self.jobs = Jobs(log, self._catalog, self._dataplane, settings, terms, self.tracer)
        # methods of `Handler`
        self.trace_settings, self.update_trace_settings = self.tracer.settings, self.tracer.update
        self._model_control = ModelControl(control, log)
        self._route_control = RouteControl(control)
        self._readiness = Readiness(self._catalog, strict=settings.strict_readiness, grace_s=settings.executor_grace_s)
        self._leaving = self._draining = False
        self._next_check: asyncio.TimerHandle | None = None
        self._unsent = UnsentCounts(log)
        self.metrics = GatewayMetrics(
            self._catalog,
            self._dataplane,
            self.jobs.counts,
            settings.metrics,
            caches=bool(settings.response_cache_size_bytes),
            joint=bool(settings.metrics_socket),
        )
        self.metrics.tracer = self.tracer
        self.metrics.offload = self.offload
        self._cache: ResponseCache | None = None
        if settings.response_cache_size_bytes:
            self._cache = ResponseCache(
                cache_log or log, settings.response_cache_size_bytes, self._catalog, self._unsent
            )
            self.metrics.cache = self._cache.store
        self._entrances = Entrances(self._catalog, self.metrics, self._unsent, caches=self._cache is not None)
        self.routes = self._entrances.choice.rules
        self._releases = ReleaseWatch(log, control, settings.incarnation)
        self._shadows = ShadowRequests(log, self._ask_shadow)
        self._recorder = RequestRecorder(log)
        self.metrics.more.append(
            lambda: release_metrics(self._entrances.choice, self._releases, self._shadows, self._recorder)
        )
        self.lane = Doors(
            *(log, self._catalog, self._dataplane, self._entrances, terms, self.tracer, settings.incarnation),
            self.payloads,
            is_on=settings.express_lane,
        )
        self.metrics.lane_requests = lambda: self.lane.waves.requests
        self.metrics.lane_pending = lambda: self.lane.waves.pending_requests
        self._wave_statistics = WaveStatistics(log, settings.incarnation)
        self._streams = OpenStreams(log, settings.incarnation)
        requester = self._requester = self._dataplane.requester
        requester.on_facts = self._wave_statistics.on_facts
        requester.on_wave = self.lane.waves.on_reply
        requester.on_stray = lambda response: self.lane.waves.on_response(response) or self.tracer.report_for(response)

    async def start(self) -> None:
        await self._dataplane.start()
        self._readiness.watch()
        self.lane.start()
        if self.payloads is not None:
            await self.lane.replies.start(self.payloads.socket_path)
        self.jobs.start()
        self._releases.start()
        if self._cache is not None:
            self._cache.start()
        if self._tenants is not None:
            self._tenants.on_change = self._callers_changed
            self._check_tenants()
        await self.publish_weights()

    async def publish_weights(self) -> None:
        """Publish the tenants' weights for the batchers, unless the log has them. Raises `LogUnavailable`."""
        if self._tenants is not None and self._settings.api_keys:
            weights = self._tenants.lane_weights()
            if weights != self._catalog.lane_weights:
                await self._control.announce(LanesWeighed({str(lane): weight for lane, weight in weights.items()}))

    async def publish_routes(self) -> None:
        """Publish the rules of a log that was replaced; where the new one has them, this changes nothing. Raises
        `LogUnavailable`.
        """
        for fact in self._catalog.routes.unwritten():
            await self._control.announce(fact)

    def _check_tenants(self) -> None:
        """Check the tenants' file from time to time: requests in the lane do not identify their caller."""
        assert self._tenants is not None
        self._next_check = asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._check_tenants)
        self._tenants.look()

    def _callers_changed(self) -> None:
        self.lane.callers_changed()
        self._dataplane.spawn(self._weights_changed())

    async def _weights_changed(self) -> None:
        with contextlib.suppress(CharoniaError):
            await self.publish_weights()

    def begin_anew(self) -> None:
        """The log was replaced: waiting requests are lost, and executors report again what they serve."""
        self._requester.begin_anew()
        self.lane.begin_anew()
        self._readiness.forget()
        if self._cache is not None:
            self._cache.store.forget()
        self.jobs.begin_anew()
        self._releases.begin_anew()
        self._control.begin_anew()
        self.tracer.begin_anew()

    def leave_rotation(self) -> None:
        """Turn readiness off, so that proxies choose other gateways; requests are still served."""
        self._leaving = True

    def begin_drain(self) -> None:
        """Turn readiness off and refuse new requests (R41)."""
        self._leaving = self._draining = self._entrances.is_draining = True
        self.lane.begin_drain()
        self.jobs.begin_drain()
        self._shadows.begin_drain()

    async def drained(self) -> None:
        """Returns when no caller waits for a request any more."""
        await self._requester.wait_idle()

    async def close(self) -> None:
        if self._next_check is not None:
            self._next_check.cancel()
        with contextlib.suppress(CharoniaError):
            await self._unsent.flush()
        if self._cache is not None:
            await self._cache.close()
        await self._streams.close()
        await self._releases.close()
        await self._shadows.close()
        await self._recorder.close()
        await self.jobs.close()
        await self.lane.close()
        await self._dataplane.close()
        await self.tracer.close()
        self.offload.close()
        self.regions.close()

    def allocate_body(self, size_bytes: int, skew: int) -> memoryview | None:
        return self.payloads.room(size_bytes, skew) if self.payloads is not None else None

    # -- health and metadata ------------------------------------------------------------------------------------------

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return not self._leaving and self._control.log_up and self._readiness.ready()

    def model_ready(self, name: str, version: str) -> bool:
        if self._draining or not self._control.log_up:
            return False
        return self._catalog.is_ready(name, parse_version(version))

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata(self._settings.server_id, SERVER_VERSION, EXTENSIONS)

    def model_metadata(self, name: str, version: str) -> ModelMetadata:
        found = self.served_model(name, version)
        return metadata_of(found, [found.version] if version else self._catalog.served(found.model))

    def model_config(self, name: str, version: str) -> ModelConfig:
        return self.served_model(name, version).config

    def served_model(self, name: str, version: str) -> ServedVersion:
        return self._catalog.find(name, parse_version(version))

    def version_for(self, name: str, headers: Iterable[tuple[bytes, bytes]], tenant: str) -> ServedVersion:
        return self._entrances.choice.named(self.served_model(name, ""), headers, tenant)

    # -- inference ----------------------------------------------------------------------------------------------------

    async def infer(
        self,
        request: InferenceRequest,
        *,
        flush_interval_s: float = 0.0,
        options: DeliveryOptions | None = None,
    ) -> InferenceResponse:
        started_ns = monotonic_ns()
        in_regions = None
        if request.regions is not None or (request.sequence_id and self._dataplane.turns):
            in_regions = await self._read_regions(request, options)
        entrance, one = self._entrances.admit(request, started_ns, options, flush_interval_s)
        counts = entrance.counts
        try:
            if one.fallback is None:
                record = await self._send(entrance, one)
            else:
                with self._requester.waiting_caller():  # a gateway that stops waits for what is run again
                    record = await self._send(entrance, one)
                    if record.error is not None and (again := self._again(entrance, one, record.error)) is not None:
                        entrance, one = again
                        counts = entrance.counts
                        record = await self._send(entrance, one)
            if in_regions is not None:
                record = await self._counted_open(in_regions.write(record))
        except CharoniaError as error:
            counts.failures[failure_reason(error, executed=False)] += 1
            if request.trace is not None:
                trace_failed(request.trace, error)
            if entrance.recording is not None:
                self._recorder.lost(one)
            raise
        except asyncio.CancelledError:
            counts.failures["CANCELED"] += 1
            if request.trace is not None:
                left(request.trace)
            if entrance.recording is not None:
                self._recorder.lost(one)
            raise
        if entrance.recording is not None:
            self._recorder.answered(entrance.recording, one, record, started_ns)
        if request.trace is not None:
            answered(request.trace, record)
        if counts.latencies is not None:
            counts.latencies.responded(monotonic_ns() - started_ns)
        if record.error is not None:
            counts.failed(record.error, ensemble=one.served.interface.scheduling == ENSEMBLE_SCHEDULING)
            try:
                raise record.error
            finally:
                del record  # otherwise a cycle with the error's traceback would keep the request's bytes
        counts.succeeded(monotonic_ns() - started_ns)
        outputs = wanted_outputs(record.outputs, request.outputs)
        if one.shadow is not None and (rule := self.routes.get(one.served.model)) is not None:
            self._shadows.copy(request, one.shadow, rule, outputs)
        return InferenceResponse(one.served.interface.name, record.version, outputs, request.id, record.parameters)

    def _again(
        self, entrance: Entrance, one: AdmittedRequest, error: CharoniaError
    ) -> tuple[Entrance, AdmittedRequest] | None:
        """A version has failed a request: what to send to the version that its rule would have chosen otherwise
        (ADR 0058). None if the error is the answer; otherwise the failure is counted here.
        """
        again = self._entrances.admit_again(one) if may_run_again(error) else None
        if again is not None:
            entrance.counts.failed(error, ensemble=one.served.interface.scheduling == ENSEMBLE_SCHEDULING)
        return again

    async def _ask_shadow(self, request: InferenceRequest) -> ResponseRecord:
        """The answer of a shadow to a copy of a request."""
        return await self._dataplane.infer(self._entrances.admit(request, monotonic_ns())[1])

    async def _answered(
        self, entrance: Entrance, one: AdmittedRequest, moved: Callable[[Entrance], None]
    ) -> ResponseRecord:
        """The answer of `_send`; if a candidate fails, the present version's, for whose entrance `moved` is called."""
        record = await self._send(entrance, one)
        if record.error is not None and (again := self._again(entrance, one, record.error)) is not None:
            moved(again[0])
            record = await self._send(*again)
        return record

    def _send(self, entrance: Entrance, one: AdmittedRequest) -> Awaitable[ResponseRecord]:
        """Send an admitted request; returns its one answer, to be awaited."""
        request, options, rules = one.request, one.options, entrance.admission.caching
        is_plain = options is AS_USUAL or not is_job(options)
        if self._cache is not None and rules is not None and is_plain and is_cachable(request):
            send: Callable[[], Awaitable[ResponseRecord]] = partial(self._dataplane.infer, one)
            if request.trace is not None:
                send = partial(reported, request.trace, send)
            tenant = options.caller.tenant
            return self._counted_open(self._cache.answer(request, one.served, rules, tenant, send, entrance.counts))
        if request.trace is None and rules is None and not request.sequence_id and asks_nothing_more(options):
            tenant = options.caller.tenant
            way = self.lane.way(one.served, entrance.counts, one.admitted, one.level, request.timeout_us, tenant)
            if way is not None:
                return self._in_wave(way, one)
        return self._dataplane.infer(one) if is_plain else self._counted_open(self.jobs.infer(one))

    async def _read_regions(
        self, request: InferenceRequest, options: DeliveryOptions | None
    ) -> DeliveredInRegions | None:
        """Read the inputs that lie in shared memory, for one request of a sequence after the other.

        Raises H49's errors, and `ResourceExhausted`.
        """
        tenant = options.caller.tenant if options is not None else ""
        async with self._dataplane.turns.of(request):
            delivered = await self.regions.read(request, tenant, self._requester.hold, self._requester.release)
            if delivered is not None:
                await check_elements(self.offload, request)
        return delivered

    async def _in_wave(self, way: Awaited, one: AdmittedRequest) -> ResponseRecord:
        """The answer to a request that joins a wave, or takes the full way if the wave cannot leave."""
        request = one.request
        with self._requester.waiting_caller():
            data = tuple([tensor.data for tensor in request.inputs])
            if not way.takes_at_once(data):
                return await self._dataplane.infer(one)
            client_id = request.id.encode() if request.id else b""
            record = await way.infer(data, client_id, request.deadline_ns)
            return record if record is not None else await self._dataplane.infer(one)

    async def _counted_open(self, answer: Awaitable[_Answer]) -> _Answer:
        """Await an answer, and count it as open work, also while nothing is pending in the requester."""
        with self._requester.waiting_caller():
            return await answer

    async def stream(
        self,
        request: InferenceRequest,
        *,
        flush_interval_s: float = 0.0,
        options: DeliveryOptions | None = None,
    ) -> AsyncGenerator[InferenceResponse]:
        # a request has failed or succeeded by its last response that is not only a flag, as in statistics (M1)
        started_ns = monotonic_ns()
        in_regions = None
        if request.regions is not None or (request.sequence_id and self._dataplane.turns):
            in_regions = await self._read_regions(request, options)
        entrance, one = self._entrances.admit(request, started_ns, options, flush_interval_s)
        is_ensemble = one.served.interface.scheduling == ENSEMBLE_SCHEDULING
        counts = entrance.counts
        tape = None
        if entrance.recording is not None:
            tape = self._recorder.tape(entrance.recording, one, started_ns)

        def moved(again: Entrance) -> None:
            nonlocal is_ensemble, counts
            is_ensemble = again.served.interface.scheduling == ENSEMBLE_SCHEDULING
            counts = again.counts

        if not one.served.interface.decoupled:
            records = _only(self._send(entrance, one) if one.fallback is None else self._answered(entrance, one, moved))
        elif one.options is AS_USUAL or not is_job(one.options):
            records = self._dataplane.stream(one)
        else:
            records = self.jobs.stream(one)
        if in_regions is not None:
            records = in_regions.each(records)
        with self._requester.waiting_caller():
            failed: CharoniaError | None = None
            counted = False
            seen = 0
            tenant = one.options.caller.tenant
            shown = self._streams.opened(one.served.model, one.served.version, tenant, request.id)
            try:
                async with contextlib.aclosing(records):
                    async for record in records:
                        if not record.is_flag:
                            shown.responses += 1
                            shown.last_ns = wall_ns()
                            failed = record.error
                            if not seen and counts.latencies is not None:
                                counts.latencies.responded(monotonic_ns() - started_ns)
                        if record.final:  # before it is yielded: the reader may not come again
                            counted = True
                            if failed is not None:
                                counts.failed(failed, ensemble=is_ensemble)
                            else:
                                counts.succeeded(monotonic_ns() - started_ns)
                            if request.trace is not None:
                                answered(request.trace, record)
                        if tape is not None:
                            tape.add(record)
                            if record.final:
                                self._recorder.ended(tape)
                                tape = None
                        yield InferenceResponse(
                            request.model,
                            record.version,
                            wanted_outputs(record.outputs, request.outputs),
                            request.id,
                            record.parameters,
                            record.error,
                            record.final,
                            record.place or (0, seen),
                            record.bare,
                        )
                        seen += 1
                        del record  # free its memory while waiting for the next one
            except CharoniaError as error:
                if counted:
                    return
                counts.failures[failure_reason(error, executed=False)] += 1
                if request.trace is not None:
                    trace_failed(request.trace, error)
                ended = InferenceResponse(request.model, request.version, [], request.id, error=shed(error))
            except (asyncio.CancelledError, GeneratorExit):
                if not counted:
                    counts.failures["CANCELED"] += 1
                    if request.trace is not None:
                        left(request.trace)
                raise
            else:
                return
            finally:
                self._streams.closed(shown)
                if tape is not None:
                    self._recorder.left(tape)
            yield ended

    # -- callers and jobs ---------------------------------------------------------------------------------------------

    def identify(self, headers: RawHeaders) -> Caller:
        return ANYONE if self._tenants is None else self._tenants.identify(headers)

    def request_bound(self, caller: Caller) -> int:
        return 0 if self._tenants is None or not caller.tenant else self._tenants.bounds(caller.tenant).requests

    def token_bounds(self, tenant: str) -> TokenBounds:
        return NO_BOUNDS if self._tenants is None else self._tenants.policy(tenant).tokens

    async def submit_job(self, request: InferenceRequest, options: DeliveryOptions) -> JobReceipt:
        if request.regions is not None and request.regions.outputs:
            raise InvalidArgument("outputs of a request that is answered later cannot be in shared memory")
        if request.regions is not None or (request.sequence_id and self._dataplane.turns):
            await self._read_regions(request, options)
        started_ns = monotonic_ns()
        entrance, one = self._entrances.admit(request, started_ns, options)
        try:
            receipt = await self._counted_open(self.jobs.submit(one))
        except CharoniaError as error:
            entrance.counts.failures[failure_reason(error, executed=False)] += 1
            if entrance.recording is not None:
                self._recorder.lost(one)
            raise
        except asyncio.CancelledError:
            if entrance.recording is not None:
                self._recorder.lost(one)
            raise
        if entrance.recording is not None and receipt.created:
            self._recorder.submitted(entrance.recording, one, bytes.fromhex(receipt.id.partition(".")[0]), started_ns)
        return receipt

    # -- statistics and repository ------------------------------------------------------------------------------------

    async def text_assets(self, digest: str) -> bytes | None:
        return await self._log.blob(digest)

    async def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        wanted = parse_version(version)
        if name:
            try:
                served = self._catalog.served(self._catalog.resolve(name))
            except InvalidArgument:
                served = {}
            if not served:
                raise InvalidArgument(f"requested model '{name}' is not available")
            if wanted != LATEST_VERSION and wanted not in served:
                raise InvalidArgument(f"requested model version is not available for model '{name}'")
            versions = [v for v in served.values() if wanted in (LATEST_VERSION, v.version)]
        else:
            versions = [v for model in self._catalog.served_models() for v in self._catalog.served(model).values()]
        await self._unsent.flush()
        await self._wave_statistics.written({executor for v in versions if v.takes_waves for executor in v.slots})
        counted = await asyncio.gather(
            *(self._log.statistics(keys.statistics(v.model, v.version, v.content_hash)) for v in versions)
        )
        return [
            model_statistics(v.interface.name, v.version, fields, v.memory)
            for v, fields in zip(versions, counted, strict=True)
        ]

    def repository_index(self, *, ready: bool) -> list[ModelIndexEntry]:
        return [
            ModelIndexEntry(name_of(row.model), str(row.version) if row.version > 0 else "", row.state, row.reason)
            for row in self._catalog.index()
            if not ready or row.state == "READY"
        ]

    def loads_by_call(self) -> bool:
        self._model_control.check_connected()
        return self._model_control.is_allowed

    async def load_model(self, name: str, config_json: str | None, files: Mapping[str, Buffer]) -> None:
        self._refuse_when_draining()
        await self._model_control.load(name, config_json, files)

    async def unload_model(self, name: str, *, unload_dependents: bool) -> None:
        self._refuse_when_draining()
        await self._model_control.unload(name, unload_dependents=unload_dependents)

    def route(self, name: str) -> RouteRule | None:
        rule = self._catalog.routes.rules.get(self._catalog.resolve(name))
        # a client that knows a header's value can ask for the candidate
        return rule if rule is None or self._model_control.is_allowed else without_values(rule)

    async def change_route(self, name: str, wanted: Mapping[str, Any] | None) -> RouteRule | None:
        self._refuse_when_draining()
        if not self.loads_by_call():
            raise Unavailable(_ROUTES_ARE_FIXED)
        return await self._route_control.change(name, wanted)

    def registered_models(self) -> dict[str, str]:
        return self._catalog.registered()

    async def register_model(self, alias: str, name: str, directory: str) -> None:
        self._refuse_when_draining()
        await self._model_control.register(alias, name, directory)

    async def unregister_model(self, alias: str, name: str) -> None:
        self._refuse_when_draining()
        await self._model_control.unload(name, unload_dependents=True, alias=alias)

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise Unavailable(SERVER_EXITING)


async def _only(coming: Awaitable[ResponseRecord]) -> AsyncGenerator[ResponseRecord]:
    """The one answer of a request, as a stream."""
    yield await coming
