"""`charonia replay`: reads recordings, asks the candidate, prints the report.

Exit codes: 0 the answers are the same, 1 they differ, 2 it could not be found out, or wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from charonia import keys
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import (
    CharoniaError,
    ErrorCode,
    InvalidArgument,
    InvalidRecord,
    NotFound,
    StartupError,
    Unavailable,
    without_credentials,
)
from charonia.eventlog.control import folded_control
from charonia.models.config_errors import InstanceError
from charonia.models.recording_rules import EVERYONE, SHARE, TENANTS, RecordingRules, recording_rules
from charonia.operations.command_line import log_place
from charonia.releases.answer_differences import Tolerance
from charonia.wire import unpack_response
from charonia.wire.recorded_calls import unpack_recorded_call

from .candidate_answers import NOT_THE_MODELS, CandidateAnswers, Pace, Replay
from .difference_report import NOT_RUN, DifferenceReport, report_text
from .replay_lines import EXPIRED, Lines, Recorded, lines_of
from .replay_options import Target, parser, target_of, tolerances_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from charonia.catalog.catalog import Catalog
    from charonia.client import AsyncClient
    from charonia.eventlog.port import EventLog, Jobs, Notes
    from charonia.wire import ResponseRecord

_URL = "http://localhost:8000"
_ATTEMPTS = 4
_FAR_US = 2**53
_MOST = 10_000_000
_PAGE = 64
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended, as shells have it."""
_READ_AT_ONCE = 8
"""Recordings, of megabytes each: the log must not be kept from its work."""
_PROGRESS_S = 1.0


def run(words: Sequence[str], environment: Mapping[str, str], default_state_dir: Callable[[], str]) -> int:
    """The command line `words`, the command first; the exit code. Raises `SystemExit` for usage and help."""
    options = parser().parse_args(list(words))
    try:
        target = target_of(options.to) if options.to else None
        if target is None and not (options.drop and options.model):
            raise InvalidArgument("name the version to ask with --to MODEL:VERSION")
        if options.drop and options.limit:
            raise InvalidArgument("--limit bounds what is asked; with --drop use --since and --until")
        tolerances = tolerances_of(options.absolute, options.relative)
        url, password_file = log_place(options, environment, default_state_dir)
        return asyncio.run(_run(options, environment, target, tolerances, url, password_file))
    except (CharoniaError, StartupError) as error:
        sys.stderr.write(f"charonia: {error}\n")
        return NOT_RUN


async def _run(
    options: argparse.Namespace,
    environment: Mapping[str, str],
    target: Target | None,
    tolerances: Mapping[str, Tolerance],
    url: str,
    password_file: str,
) -> int:
    async with _opened(url, password_file) as log:
        catalog = await folded_control(log)
        model = catalog.resolve(options.model or (target.model if target is not None else ""))
        found, skipped = await recordings(log, model, _us(options.since, 0), _us(options.until, _FAR_US))
        own = target.version if target is not None and catalog.resolve(target.model) == model else 0
        chosen = [one for one in found if _is_chosen(one, options, 0 if options.drop else own)]
        if options.drop:
            return await _dropped(log, model, chosen, skipped, as_json=options.json)
        assert target is not None
        lines = lines_of(chosen, options.limit)
        if not lines.requests:
            raise NotFound(_nothing(model, lines, len(found) - len(chosen), _rules(catalog, model)))
        report = DifferenceReport(
            *(target.model, target.version, options.percent_different_allowed, options.min_requests, options.worst)
        )
        for one, reason in (*lines.unreplayable, *((one, EXPIRED) for one in skipped)):
            report.unreplayable(one, reason)
        pace = Pace(options.concurrency, options.rate)
        async with _client(options, environment) as client:
            candidate = await _candidate(client, target, options.timeout)
            progress = _Progress(lines.requests, report)

            async def fetch(one: Recorded) -> bytes | None:
                return (await log.notes([keys.recorded_call(model, one.id)]))[0]

            async def of_job(job_id: bytes) -> Sequence[ResponseRecord] | str:
                return await answers_of_job(log, model, job_id)

            replay = Replay(candidate.ask, fetch, report, tolerances, progress.done, of_job=of_job)
            replaying = asyncio.ensure_future(replay.run(lines.lines, pace))
            with _cancelled_by_signals(replaying):
                await asyncio.wait([replaying])
            if replaying.cancelled():
                if not report.compared:
                    _complain("interrupted before an answer was compared: there is no report")
                    return _INTERRUPTED
                _complain(f"interrupted: the report is of the {report.compared} requests that were compared before")
                replay.interrupted(lines.lines)
            else:
                await replaying
        document = report.document() | {"recorded_model": model, "seconds": progress.seconds}
        sys.stdout.write(json.dumps(document) + "\n" if options.json else report_text(document))
        return report.verdict


@contextlib.contextmanager
def _cancelled_by_signals(work: asyncio.Future[None]) -> Iterator[None]:
    """Within it the first Ctrl-C cancels the work, and so do SIGTERM and a terminal that is gone, unless they are
    ignored, as with nohup.
    """
    loop = asyncio.get_running_loop()
    ours: list[signal.Signals] = []

    def cancel() -> None:
        while ours:  # the next signal ends the command at once
            loop.remove_signal_handler(ours.pop())
        work.cancel()

    if threading.current_thread() is threading.main_thread():
        ours += [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in ours:
        loop.add_signal_handler(number, cancel)
    try:
        yield
    finally:
        for number in ours:
            loop.remove_signal_handler(number)


def _complain(sentence: str) -> None:
    sys.stderr.write(f"charonia replay: {sentence}\n")
    sys.stderr.flush()


@asynccontextmanager
async def _opened(url: str, password_file: str) -> AsyncIterator[EventLog]:
    from charonia.eventlog.redis import open_log
    from charonia.eventlog.redis.server.address import with_password

    log = open_log(with_password(url, password_file))
    await log.open()
    try:
        yield log
    finally:
        await log.close()


async def recordings(
    log: Notes, model: str, since_us: int = 0, until_us: int = _FAR_US
) -> tuple[list[Recorded], list[Recorded]]:
    """The recordings of a model from one time to another, without their tensors, and those that have expired."""
    call_ids = [
        call_id
        for call_id in await log.due(keys.recorded_times(model), until_us, _MOST)
        if len(call_id) == _ID_BYTES and _at_us(call_id) >= since_us
    ]
    found: list[Recorded] = []
    expired: list[Recorded] = []
    for at in range(0, len(call_ids), _READ_AT_ONCE):
        page = call_ids[at : at + _READ_AT_ONCE]
        records = await log.notes([keys.recorded_call(model, call_id) for call_id in page])
        for call_id, record in zip(page, records, strict=True):
            if record is None:
                expired.append(Recorded(call_id, _at_us(call_id), 0))
            else:
                found.append(_described(call_id, record))
    return found, expired


_ID_BYTES = 16


async def answers_of_job(log: Jobs, model: str, job_id: bytes) -> Sequence[ResponseRecord] | str:
    """The responses of a job of a model; or why there are none that its model gave, in words."""
    job = await log.job(model, job_id)
    if job is None:
        return "its job is not kept any more"
    if not job.state.terminal:
        return "its job has not ended"
    record = await log.job_result(model, job_id)
    if record is None:
        return f"its job is {job.state.value}, and no answer of it is kept"
    try:
        last = unpack_response(record)
        if last.error is not None and last.error.code in (*NOT_THE_MODELS, ErrorCode.CANCELLED):
            return f"its job is {job.state.value}: {last.error.message}"
        found: list[ResponseRecord] = []
        while last.place is not None and (page := await log.job_responses(model, job_id, len(found) - 1, _PAGE)):
            for _, index, packed in page:
                if index != len(found):
                    return "a response of its job is not kept any more"
                found.append(unpack_response(packed))
        if last.place is not None and last.place[1] > len(found):
            return "a response of its job is not kept any more"
    except InvalidRecord as error:
        return f"the answer of its job cannot be read: {error}"
    # the end of a stream may only say that there are no more
    is_response = last.place is None or last.outputs or last.bare or last.error is not None
    return [*found, last] if is_response else found


def _at_us(call_id: bytes) -> int:
    return int.from_bytes(call_id[:8], "big")


def _described(call_id: bytes, record: bytes) -> Recorded:
    try:
        call = unpack_recorded_call(record)
    except InvalidRecord as error:
        return Recorded(call_id, _at_us(call_id), 0, unkept=f"its recording cannot be read: {error}")
    return Recorded(
        *(call_id, call.at_us, call.version, call.tenant, call.client_id, call.sequence, call.unkept),
    )


def _is_chosen(one: Recorded, options: argparse.Namespace, own: int) -> bool:
    if options.tenant and one.tenant not in options.tenant:
        return False
    return one.version == options.answered_by if options.answered_by else not own or one.version != own


def _rules(catalog: Catalog, model: str) -> RecordingRules | str:
    """What the newest version of a model says of recordings that says anything; or, in words, why none is recorded."""
    served = catalog.served(model)
    if not served:
        return "it is not served, so the log does not say whether it records any"
    for version in sorted(served, reverse=True):
        with contextlib.suppress(InstanceError):
            rules = recording_rules(served[version].config)
            if rules is not None:
                return rules
    return (
        "journals have no tensors, and it records no requests: set parameters { "
        f'key: "{SHARE}" value {{ string_value: "0.01" }} }} in its config.pbtxt and load it again'
    )


def _nothing(model: str, lines: Lines, others: int, rules: RecordingRules | str) -> str:
    """Why there is nothing to ask, and what to do about it."""
    text = f"no recorded request of model '{model}' can be asked again"
    if lines.unreplayable:
        text += f": {len(lines.unreplayable)} are kept without tensors, or of sequences with gaps"
    if others:
        text += f"; {others} are of other tenants or versions"
    if lines.unreplayable or others:
        return text
    if isinstance(rules, str):
        return f"{text}: {rules}"
    named = ", ".join(sorted(rules.tenants))
    tenants = "any tenant" if EVERYONE in rules.tenants else f"the tenants {named}" if named else "no tenant"
    return (
        f"{text}: it records {rules.share * 100:g} % of the requests without a tenant, and of those of {tenants} "
        f"({TENANTS}), keeps them {rules.keep_s / 86_400:g} days, and none of this time is there"
    )


def _us(when: tuple[str, float] | None, default: int) -> int:
    if when is None:
        return default
    kind, seconds = when
    return int((wall_ns() / 1e9 - seconds if kind == "ago" else seconds) * 1e6)


async def _dropped(
    log: Notes, model: str, chosen: Sequence[Recorded], expired: Sequence[Recorded], *, as_json: bool
) -> int:
    """Delete recordings, and what the indexes still say of expired ones."""
    call_ids = [one.id for one in (*chosen, *expired)]
    for at in range(0, len(call_ids), _PAGE):
        page = call_ids[at : at + _PAGE]
        await log.delete_keys([keys.recorded_call(model, call_id) for call_id in page])
        await log.keep_recent(keys.recorded_sizes(model), {}, _FAR_US, drop=page)
        await log.drop_times(keys.recorded_times(model), page)
    text = f"{len(chosen)} recordings of model '{model}' deleted"
    sys.stdout.write((json.dumps({"model": model, "deleted": len(chosen)}) if as_json else text) + "\n")
    return 0


# -- the candidate -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _client(options: argparse.Namespace, environment: Mapping[str, str]) -> AsyncIterator[AsyncClient]:
    from charonia.client import AsyncClient, RetryPolicy, Tls

    headers = {}
    for header in options.header:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            raise InvalidArgument(f"--header '{header}' is not NAME: VALUE")
        headers[name.strip()] = value.strip()
    url = options.url or environment.get("CHARONIA_URL") or _URL
    retry = RetryPolicy(_ATTEMPTS)
    async with AsyncClient(url, headers=headers, retry=retry, tls=Tls(ca_file=options.ca_file)) as client:
        yield client


async def _candidate(client: AsyncClient, target: Target, timeout_s: float) -> CandidateAnswers:
    """Raises `Unavailable` for a version that is not ready."""
    version = str(target.version)
    if not await client.ready(target.model, version):
        raise Unavailable(
            f"version {version} of model '{target.model}' is not ready at {without_credentials(client.url)}"
        )
    policy = (await client.config(target.model, version)).get("model_transaction_policy") or {}
    return CandidateAnswers(client, target, timeout_s, decoupled=bool(policy.get("decoupled")))


class _Progress:
    """Says on stderr how far a replay is, about once a second."""

    def __init__(self, requests: int, report: DifferenceReport) -> None:
        self._requests = requests
        self._report = report
        self._done = 0
        self._began_ns = self._said_ns = monotonic_ns()

    @property
    def seconds(self) -> float:
        return round((monotonic_ns() - self._began_ns) / 1e9, 3)

    def done(self) -> None:
        self._done += 1
        now_ns = monotonic_ns()
        if now_ns - self._said_ns >= _PROGRESS_S * 1e9:
            self._said_ns = now_ns
            _complain(f"{self._done} of {self._requests} requests, {self._report.different} differ")
