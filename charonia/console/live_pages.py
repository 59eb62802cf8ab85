"""What each page shows, and the live updates of a page that is open: regions as HTML in server-sent events.

Values come from the metrics and the log (`readings`, `log_views`, `stories`); `web_app` asks for them once for a
page, and `events` after each reading. What was read for one viewer serves all who may see the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError
from charonia.eventlog.port import EventLog
from charonia.facts.jobs import JobState
from charonia.operations.dead_letters import LetterPlace
from charonia.operations.job_commands import Place

from . import log_views
from .actions.action_routes import Acts
from .cursors import Cursors
from .log_views import ReadStatistics
from .readings import READ_S, PerSample, Sample, Sampler
from .server_figures import LOAD, ModelFigures, bars, batch_fill, quantiles_ms
from .stories.request_reading import ReadWebhook, request_page
from .viewers import Viewer

Values = dict[str, Any]
Render = Callable[[str, Acts | None, Values], str]
"""A region as HTML: the name of its template, what the viewer may do, its values."""

REGIONS: Mapping[str, tuple[str, ...]] = {
    "overview": ("tiles", "models_table", "executors"),
    "models": ("models_table",),
    "streams": ("streams_table",),
    "model": (
        "model_tiles",
        "model_control",
        "model_versions",
        "model_route",
        "model_time",
        "model_batches",
        "model_queue",
    ),
    "jobs": ("jobs_table",),
    "letters": ("letters_table",),
    "request": (
        "request_state", "request_summary", "request_orders", "request_time", "request_events", "request_attempts",
        "request_record",
    ),
}  # fmt: skip
"""Of each page the templates that are rendered again, which are also the ids of their elements."""
WORDS = ("model", "id", "state", "after")
"""Of the addresses of pages; a page without one has "" or none."""
_PLOTTED = frozenset({"overview", "model"})
_BUSY_SHARE = 0.1
"""Of the time, what is read for an open page may take so much: a page whose reading takes longer is read less often."""
_MAX_REST_S = 30.0


class LivePages:
    """The values of pages, and their updates."""

    def __init__(
        self,
        log: EventLog,
        sampler: Sampler,
        read_statistics: ReadStatistics,
        read_webhook: ReadWebhook,
        render: Render,
    ) -> None:
        self._log = log
        self._sampler = sampler
        self._read_statistics = read_statistics
        self._read_webhook = read_webhook
        self._render = render
        self._per_sample = PerSample()
        self._job_cursors, self._letter_cursors = Cursors[Place](), Cursors[LetterPlace]()

    async def values(self, page: str, asked: Mapping[str, str], viewer: Viewer) -> Values:
        """What a page shows now. `asked` are the `WORDS` of its address. Raises `NotFound`."""
        if page in ("overview", "models"):
            return self._overview(await self._sampler.latest())
        found = await self._read(page, asked, viewer)
        return self._model(await self._sampler.latest(), found) if page == "model" else found

    async def events(
        self, page: str, asked: Mapping[str, str], viewer: Viewer, acts: Acts | None = None
    ) -> AsyncIterator[bytes]:
        """Events `update` with regions, and for pages with plots a point, or at the beginning all points; `problem`
        when there was no reading; `ended` when nothing more can happen.
        """
        first, rest_until_s, model = True, 0.0, asked.get("model", "")
        async for sample in self._sampler.follow():
            if sample.error:  # the page keeps what it shows, and says how old that is
                yield _event("problem", {"text": sample.error})
                continue
            found: Values | None = None
            begun_s = monotonic_ns() / 1e9
            try:
                if begun_s >= rest_until_s:
                    async with asyncio.timeout(READ_S):
                        found = await self._live_values(page, asked, viewer, sample, again=first)
            except CharoniaError as error:
                yield _event("problem", {"text": error.message})
                continue
            except TimeoutError:
                yield _event("problem", {"text": f"The log does not answer within {READ_S:g} s"})
                continue
            finally:
                if begun_s >= rest_until_s:
                    now_s = monotonic_ns() / 1e9
                    rest_until_s = begun_s + min((now_s - begun_s) / _BUSY_SHARE, _MAX_REST_S)
            update: Values = {"regions": {}}
            if found is not None:
                update["regions"] = {name: self._render(name, acts, found) for name in REGIONS[page]}
            if page in _PLOTTED:
                update |= {"history": self._sampler.history(model)} if first else {"point": self._sampler.point(model)}
            first = False
            if found is not None and page == "request" and found["ended"]:
                yield _event("ended", update)
                return
            yield _event("update", update)

    async def _live_values(
        self, page: str, asked: Mapping[str, str], viewer: Viewer, sample: Sample, *, again: bool
    ) -> Values:
        if page in ("overview", "models"):
            return self._overview(sample)

        async def read() -> Values:
            return await self._read(page, asked, viewer)

        key = (page, viewer, tuple(sorted(asked.items())))
        # what was kept before this page was opened may be older than the page, which often follows an action
        found = await self._per_sample.get(sample, key, read, again=again)
        return self._model(sample, found) if page == "model" else found

    async def _read(self, page: str, asked: Mapping[str, str], viewer: Viewer) -> Values:
        """What the log has for a page."""
        model, after = asked.get("model", ""), asked.get("after", "")
        if page == "model":
            return await log_views.model_page(self._log, model, viewer, self._read_statistics)
        if page == "streams":
            return await log_views.stream_list(self._log, viewer)
        if page == "request":
            return await request_page(self._log, model, asked.get("id", ""), viewer, self._read_webhook)
        if page == "letters":
            listed = await log_views.letter_list(self._log, viewer, model, after, self._letter_cursors)
            return {**listed, "model": model, "after": after}
        state = asked.get("state", "")
        listed = await log_views.job_list(self._log, viewer, model, state, after, self._job_cursors)
        return {**listed, "model": model, "state": state, "after": after, "states": [one.value for one in JobState]}

    def _overview(self, sample: Sample) -> Values:
        server = self._sampler.server()
        view = sample.log or {"executors": [], "models": [], "log": None, "lag_s": None, "queued": None}
        by_model: dict[str, list[ModelFigures]] = {}
        for one in server.models:
            by_model.setdefault(one.model, []).append(one)
        most = {
            (row["model"], str(version["version"])): version["max_batch"]
            for row in view["models"]
            for version in row["versions"]
        }
        return {
            "server": server,
            "figures": by_model,
            "most": most,
            "fill": batch_fill(server.models, most),
            "fills": {name: batch_fill(figures, most) for name, figures in by_model.items()},
            "has_metrics": bool(sample.scrape.families),
            "problem": sample.error,
            "sampled_us": int(sample.wall_s * 1e6),
            **view,
        }

    def _model(self, sample: Sample, found: Values) -> Values:
        model = found["model"]
        numbers = [one for one in self._sampler.server().models if one.model == model]
        for row in found["versions"]:
            loaded_s = sample.scrape.of_model(LOAD, model, str(row["version"]))
            row["load_s"] = row["load_s"] or loaded_s
        for counted in found["statistics"]:
            counts = [(str(batch["batch_size"]), batch["compute_infer"]["count"]) for batch in counted["batches"]]
            counted["bars"] = bars(counts)
        most = {(model, str(row["version"])): row["max_batch"] for row in found["versions"]}
        return {
            **found,
            "figures": numbers,
            "most": most,
            "fills": {one.version: batch_fill([one], most) for one in numbers},
            "quantiles": quantiles_ms(sample.scrape, model),
            "has_metrics": bool(sample.scrape.families),
            "sampled_us": int(sample.wall_s * 1e6),
        }


def _event(name: str, document: Values) -> bytes:
    return f"event: {name}\ndata: {json.dumps(document)}\n\n".encode()
