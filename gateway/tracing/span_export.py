"""Sends spans to an OpenTelemetry collector over OTLP/HTTP (N1, N6), in the background and within bounds.

The SDK's batch processor gathers and sends; what it cannot hold, or the collector does not take, is lost and counted.
The SDK's own environment variables (headers, certificates) hold beside the options.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from charonia.errors import StartupError
from charonia.traces.trace_settings import TraceOptions

from .trace import Finished

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    from .spans import SpanMaker
except ImportError as error:  # pragma: no cover - the package depends on them
    raise StartupError(
        "--trace-config opentelemetry needs the packages opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http: "
        f"{error}"
    ) from None

SERVICE = "triton-inference-server"
"""The service name that Triton's spans have, unless `resource` says another."""
_TIMEOUT_S = 5.0
_CLOSE_S = 2.0

_log = logging.getLogger(__name__)


class _Counted(SpanExporter):
    """The exporter, and how much of what it was given is lost."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._failing = False
        self.taken = self.lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception:
            result = SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            self.lost += len(spans)
            if not self._failing:  # once for a row of failures
                _log.warning("the collector does not take spans: they are dropped until it does")
        self._failing = result is not SpanExportResult.SUCCESS
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class SpanExport:
    """The `Sink` of mode opentelemetry. `exporter` is another way out, for tests."""

    def __init__(
        self, options: TraceOptions, instance: str, version: str, exporter: SpanExporter | None = None
    ) -> None:
        resource = {SERVICE_NAME: SERVICE, SERVICE_INSTANCE_ID: instance, **dict(options.resource)}
        self._maker = SpanMaker(Resource.create(resource), version)
        # what fails is said once here; the exporter would say so for every batch
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        # callers may write what they like into a tracestate
        logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)
        self._exporter = _Counted(exporter or OTLPSpanExporter(endpoint=options.url, timeout=_TIMEOUT_S))
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=options.bsp_max_queue_size,
            schedule_delay_millis=options.bsp_schedule_delay,
            max_export_batch_size=options.bsp_max_export_batch_size,
        )
        self._most = options.bsp_max_queue_size
        self._given = self._refused = 0

    @property
    def dropped(self) -> int:
        return self._refused + self._exporter.lost

    def write(self, traces: Sequence[Finished]) -> None:
        for trace in traces:
            try:
                spans = self._maker.spans(trace)
            except Exception:  # one that cannot be told must not take the others with it
                _log.exception("a trace of model '%s' cannot be sent", trace.report.model)
                self._refused += 1
                continue
            # the processor drops without a word; half a trace is no use to anybody
            if self._given - self._exporter.taken + len(spans) > self._most:
                self._refused += len(spans)
                continue
            self._given += len(spans)
            for span in spans:
                self._processor.on_end(span)

    def close(self) -> None:
        """Send what waits, unless that takes too long."""
        ending = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)
