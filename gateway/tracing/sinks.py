"""Where the traces of a gateway go, by its settings."""

from __future__ import annotations

from charonia.options.settings import SERVER_VERSION, GatewaySettings
from charonia.traces.trace_settings import OPENTELEMETRY

from .triton_file import TritonFile
from .writer import TraceWriter


def trace_writer(settings: GatewaySettings) -> TraceWriter | None:
    """None where traces would lead nowhere. Raises `StartupError` for a library that is missing."""
    options = settings.tracing
    if not options.leads_somewhere:
        return None
    if options.mode == OPENTELEMETRY:
        from .span_export import SpanExport  # its libraries take time to load

        return TraceWriter(SpanExport(options, settings.incarnation, SERVER_VERSION))
    return TraceWriter(TritonFile(options.file))
