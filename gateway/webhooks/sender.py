"""Delivers the webhooks of ended jobs: at least once, in no order, without delaying execution.

The settle script appends an ended job with a webhook to `wh:{m}`. A sender moves such entries to `wht:{m}`, the set of
webhooks to call ordered by time, and calls those that are due; a failed call gets a later time, a final one leaves the
set. A member of the set is the job's id, then a digest of the host and one of the tenant. All state is in the log; in
memory are only the current calls and those that come next: their number is bounded, and shared among tenants (`turns`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from charonia import keys
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import InvalidArgument, LogUnavailable
from charonia.eventlog.port import START, Entry, EventLog
from charonia.facts.jobs import JobRecord
from charonia.tasks import Tasks

from . import deliveries
from .addresses import Allowed, check_url
from .deliveries import Delivery
from .keyring import Keyring
from .loads import DIGEST_BYTES, Load, Loads, digest_of_host, digest_of_tenant
from .messages import message_of
from .posting import AddressRefused, Answer, Poster
from .retries import DeliveryState, judge
from .turns import Turns, within_share

_log = logging.getLogger(__name__)

_ID_BYTES = 16
_PAGE = 256
_PAGES = 16
"""Pages of one model before other models have their turn."""
_HELD_PER_TURN = 4
_MODELS_AT_ONCE = 64
_STUMBLED_S = 60
_NEXT_LOOK_S = 0.02
"""The earliest next check for webhooks postponed because their host is busy."""
_RECORD_AGAIN_S = 0.2
_NAMED = 1000
_FIELD_ID = b"i"

OUTCOMES = ("delivered", "failed", "disabled", "refused", "given_up", "unsigned", "lost")
"""`failed` is tried again; `unsigned` waits for a secret; `lost`: the job was forgotten before the call."""


class Sender:
    """Delivers for the models that `mine` selects. `outcomes` counts calls by their end, `pending` those that wait."""

    def __init__(
        self,
        log: EventLog,
        mine: Callable[[list[str]], list[str]],
        poster: Poster,
        keyring: Keyring,
        allowed: Allowed,
        *,
        first_retry_s: float = 5.0,
        concurrency: int = 64,
        concurrency_per_host: int = 4,
    ) -> None:
        self._log = log
        self._mine = mine
        self._poster = poster
        self._keyring = keyring
        self._allowed = allowed
        self._first_retry_s = first_retry_s
        self._look_s = min(1.0, first_retry_s / 2)
        self._most_held = concurrency * _HELD_PER_TURN
        self._hosts = hosts = Loads(concurrency_per_host)
        """By host and tenant: what one tenant sends a host does not postpone what others send it."""
        self._tenants = Loads(concurrency)
        self._turns = Turns(concurrency, concurrency_per_host, lambda tenant, host: hosts.is_slow(host + tenant))
        self._held: dict[tuple[str, bytes], asyncio.Task[None]] = {}
        self._held_of: dict[str, int] = {}
        self._models: set[str] = set()
        self._names: dict[bytes, str] = {}
        self._touched: set[str] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._wake = asyncio.Event()
        self._reader = log.reader()
        self._tasks = Tasks()
        """The loop that looks for due calls. The calls themselves are in `_held`."""
        self._stopping = False
        self._unsigned: set[str] = set()
        self._pending_of: dict[str, int] = {}
        self.outcomes = dict.fromkeys(OUTCOMES, 0)

    @property
    def pending(self) -> int:
        return sum(self._pending_of.values())

    def start(self) -> None:
        self._reader.start(self._on_entries)
        self._tasks.spawn(self._run(), "webhooks")

    async def close(self, grace_s: float) -> None:
        """Begin nothing more and wait for running calls; other senders repeat those that are cut off."""
        self._stopping = True
        await self._tasks.close()
        for timer in self._timers.values():
            timer.cancel()
        if self._held:
            await asyncio.wait(self._held.values(), timeout=grace_s)
        for task in self._held.values():
            task.cancel()
        await asyncio.gather(*self._held.values(), return_exceptions=True)
        await self._reader.close()

    # -- what to look at ----------------------------------------------------------------------------------------------

    def _on_entries(self, stream: bytes, _entries: list[Entry]) -> None:
        model = self._names.get(stream)
        if model is not None:
            self._touch(model)

    def _touch(self, model: str) -> None:
        self._touched.add(model)
        self._wake.set()

    def _touch_at(self, model: str, time_us: int) -> None:
        """Check again at a time, the earliest that was named."""
        loop = asyncio.get_running_loop()
        at_s = loop.time() + max(_NEXT_LOOK_S, time_us / 1e6 - wall_ns() / 1e9)
        known = self._timers.get(model)
        if known is not None:
            if known.when() <= at_s:
                return
            known.cancel()
        self._timers[model] = loop.call_at(at_s, self._timed, model)

    def _timed(self, model: str) -> None:
        del self._timers[model]
        self._touch(model)

    async def _run(self) -> None:
        """Check the models with changes at once, and all models periodically: nothing depends on a wake-up."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        log_up = True
        while True:
            everything = loop.time() >= due_s
            try:
                if everything:
                    due_s = loop.time() + self._look_s
                    self._keyring.refresh()
                    await self._follow_models()
                models = self._models if everything else self._touched & self._models
                self._wake.clear()
                self._touched = set()
                await self._look_at(sorted(models))
                log_up = True
            except LogUnavailable as error:
                if log_up:
                    _log.warning("webhooks wait for the log: %s", error)
                log_up = False
                await asyncio.sleep(max(0.0, due_s - loop.time()))
            except Exception:
                _log.exception("webhooks could not be looked at")
                await asyncio.sleep(max(0.0, due_s - loop.time()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._wake.wait()

    async def _follow_models(self) -> None:
        models = set(self._mine(await self._log.job_models()))
        for model in self._models - models:
            self._reader.remove(keys.webhooks(model))
            self._names.pop(keys.webhooks(model), None)
            self._pending_of.pop(model, None)
        for model in models - self._models:
            self._names[keys.webhooks(model)] = model
            self._reader.add(keys.webhooks(model), b"$")
        self._models = models

    async def _look_at(self, models: list[str]) -> None:
        for at in range(0, len(models), _MODELS_AT_ONCE):
            looks = (self._look(model) for model in models[at : at + _MODELS_AT_ONCE])
            for problem in await asyncio.gather(*looks, return_exceptions=True):
                if isinstance(problem, LogUnavailable):
                    raise problem
                if isinstance(problem, BaseException):
                    _log.error("webhooks of a model could not be looked at", exc_info=problem)

    async def _look(self, model: str) -> None:
        await self._take_in(model)
        await self._call_due(model)
        self._pending_of[model] = await self._log.count_times(keys.webhook_times(model))

    # -- from the stream into the set ---------------------------------------------------------------------------------

    async def _take_in(self, model: str) -> None:
        stream = keys.webhooks(model)
        after = START
        for _ in range(_PAGES):
            entries = await self._log.range(stream, after, _PAGE)
            if not entries:
                return
            after = entries[-1].id
            ids = [job_id for job_id in map(_id_of, entries) if job_id is not None]
            reads = (self._log.job(model, job_id) for job_id in ids)
            times: dict[bytes, int] = {}
            for job in await asyncio.gather(*reads, return_exceptions=True):
                if isinstance(job, LogUnavailable):
                    raise job
                if isinstance(job, BaseException):
                    _log.error("the record of a job with a webhook could not be read", exc_info=job)
                    self.outcomes["lost"] += 1
                elif job is None:
                    self.outcomes["lost"] += 1
                elif (host := self._host_of(job)) is not None:
                    times[job.id + host + digest_of_tenant(job.tenant)] = job.ended_us
            await self._log.set_times(keys.webhook_times(model), times)
            await self._log.delete_entries(stream, [entry.id for entry in entries])
            if len(entries) < _PAGE:
                return
        self._touch(model)

    def _host_of(self, job: JobRecord) -> bytes | None:
        """The digest of the host to call; None if the webhook is not called for this end."""
        if not deliveries.called(job):
            return None
        try:
            return digest_of_host(check_url(_webhook(job).get("url"), self._allowed))
        except InvalidArgument:
            return bytes(DIGEST_BYTES)  # refused when it is called

    # -- from the set to the endpoints --------------------------------------------------------------------------------

    async def _call_due(self, model: str) -> None:
        key = keys.webhook_times(model)
        for _ in range(_PAGES):
            # running calls are still in the set: only a final outcome removes one
            count = _PAGE + self._held_of.get(model, 0)
            members = await self._log.due(key, wall_ns() // 1000, count)
            postponed: dict[bytes, int] = {}
            for member in members:
                if (model, member) in self._held:
                    continue
                host = self._hosts.get(member[_ID_BYTES:])
                tenant = self._tenants.get(_tenant_in(member))
                if host.full:
                    postponed[member] = host.postponed_us()
                elif not within_share(tenant.held, self._most_held - len(self._held)):
                    postponed[member] = tenant.postponed_us()
                else:
                    self._hold(model, member, (host, tenant))
            if postponed:
                await self._log.set_times(key, postponed)
                self._touch_at(model, min(postponed.values()))
            if len(members) < count:
                return
        self._touch(model)

    def _hold(self, model: str, member: bytes, loads: tuple[Load, ...]) -> None:
        for load in loads:
            load.held += 1
        self._held_of[model] = self._held_of.get(model, 0) + 1
        self._held[model, member] = asyncio.create_task(self._deliver(model, member, loads))

    async def _deliver(self, model: str, member: bytes, loads: tuple[Load, ...]) -> None:
        try:
            async with self._turns.turn(_tenant_in(member), _host_in(member)):
                if not self._stopping:
                    await self._call(model, member, loads)
            self._touch(model)
        except LogUnavailable:
            pass  # it stays due
        except Exception:
            _log.exception("webhook of job %s could not be called", member[:_ID_BYTES].hex())
            with contextlib.suppress(LogUnavailable):
                later_us = wall_ns() // 1000 + _STUMBLED_S * 1_000_000
                await self._log.set_times(keys.webhook_times(model), {member: later_us})
        finally:
            for load in loads:
                load.held -= 1
            del self._held[model, member]
            self._held_of[model] -= 1
            if not self._held_of[model]:
                del self._held_of[model]

    async def _call(self, model: str, member: bytes, loads: tuple[Load, ...]) -> None:
        """Try one webhook once, and write the outcome."""
        key = keys.webhook_times(model)
        job_id = member[:_ID_BYTES]
        job, (note,) = await asyncio.gather(
            self._log.job(model, job_id), self._log.notes([keys.webhook_state(model, job_id)])
        )
        delivery = deliveries.unpack(note) if note is not None else Delivery()
        if job is None or delivery.state.final:
            # it is final already, only the set does not show it
            self.outcomes["lost"] += job is None
            await self._log.drop_times(key, [member])
            return
        if delivery.next_us > wall_ns() // 1000:
            await self._log.set_times(key, {member: delivery.next_us})
            return
        secrets = self._keyring.secrets_of(job.tenant)
        if not secrets:
            self.outcomes["unsigned"] += 1
            if job.tenant not in self._unsigned and len(self._unsigned) < _NAMED:
                self._unsigned.add(job.tenant)
                _log.error("no webhook secret for tenant '%s': its webhooks wait", job.tenant)
            later_us = wall_ns() // 1000 + _STUMBLED_S * 1_000_000
            await self._record(job, member, replace(delivery, last_error="no secret to sign with", next_us=later_us))
            return
        message = message_of(job)
        headers = message.headers(secrets, wall_ns() // 1_000_000_000)
        began_ns = monotonic_ns()
        try:
            endpoint = check_url(_webhook(job).get("url"), self._allowed)
            answer = await self._poster.post(endpoint, headers, message.body, _tenant_in(member))
        except (AddressRefused, InvalidArgument) as error:
            answer, refused = Answer(0, str(error)), True
        else:
            refused = False
            for load in loads:
                load.took((monotonic_ns() - began_ns) / 1e9)
        delivery = self._after(delivery, answer, refused=refused)
        if delivery.state.final and delivery.state is not DeliveryState.DELIVERED:
            why = f"{delivery.attempts} tries, {answer.error or f'status {answer.status}'}"
            _log.warning("webhook of job %s: %s after %s", job.public_id, delivery.state, why)
        await self._record(job, member, delivery)

    def _after(self, delivery: Delivery, answer: Answer, *, refused: bool) -> Delivery:
        """The state after a call, which is counted."""
        now_us = wall_ns() // 1000
        attempts = delivery.attempts + 1
        verdict = judge(attempts, answer.status, self._first_retry_s, random.random(), answer.retry_after_s)
        state = DeliveryState.REFUSED if refused else verdict.state
        self.outcomes["failed" if state is DeliveryState.PENDING else str(state)] += 1
        next_us = 0 if state.final else now_us + int(verdict.wait_s * 1e6)
        return Delivery(state, attempts, answer.status, answer.error, now_us, next_us)

    async def _record(self, job: JobRecord, member: bytes, delivery: Delivery) -> None:
        """Write the outcome of a call; while the log is away it is kept in memory, so that no call is repeated."""
        key = keys.webhook_times(job.model)
        while True:
            try:
                await deliveries.keep(self._log, job, delivery)
                if delivery.state.final:
                    await self._log.drop_times(key, [member])
                else:
                    await self._log.set_times(key, {member: delivery.next_us})
                return
            except LogUnavailable:
                await asyncio.sleep(_RECORD_AGAIN_S)


def _id_of(entry: Entry) -> bytes | None:
    """The job in an entry of `wh:{m}`; None for an entry that cannot be read."""
    for name, value in zip(entry.fields[::2], entry.fields[1::2], strict=False):
        if bytes(name) == _FIELD_ID:
            with contextlib.suppress(ValueError):
                job_id = bytes.fromhex(bytes(value).decode())
                return job_id if len(job_id) == _ID_BYTES else None
    return None


def _host_in(member: bytes) -> bytes:
    return member[_ID_BYTES : _ID_BYTES + DIGEST_BYTES]


def _tenant_in(member: bytes) -> bytes:
    """The digest of the tenant; empty in a member that an earlier release has written."""
    return member[_ID_BYTES + DIGEST_BYTES :]


def _webhook(job: JobRecord) -> Mapping[str, Any]:
    webhook = job.about.get("webhook")
    return webhook if isinstance(webhook, Mapping) else {}
