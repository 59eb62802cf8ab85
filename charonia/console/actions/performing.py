"""Does what an order says with the functions of the operators' commands and of the API, and says what came of it.

What a tenant may do it may do to its own work: of another tenant's it learns no more than that the console has none by
that name. Each order and its outcome is a line of the process's log. Who may order what at all is `orders`' to say.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from charonia.calls.model_control import ModelControl
from charonia.calls.request_endings import BY_CALLER
from charonia.clock import wall_ns
from charonia.console.viewers import Viewer
from charonia.errors import CharoniaError, InvalidArgument, NotFound, Unavailable
from charonia.eventlog.control import FollowedControl
from charonia.eventlog.port import EventLog
from charonia.facts.jobs import public_id
from charonia.models.names import name_of
from charonia.operations import dead_letters, moving, queues
from charonia.operations import job_commands as jobs
from charonia.tasks import Tasks

from .notices import Notice
from .orders import Action, Order

_ANSWER_S = 10.0
"""For so long a page waits for a model to be loaded or unloaded; then that goes on by itself."""
_MODEL_S = 3600.0
_POLL_S = 0.1
_ID = re.compile(r"[0-9a-f]{32}")
_ENTRY = re.compile(r"\d{1,19}-\d{1,19}", re.ASCII)

_log = logging.getLogger(__name__)


class Performer:
    """Performs orders on one log."""

    def __init__(self, log: EventLog) -> None:
        self._event_log = log
        self._answer_s = _ANSWER_S
        self._tasks = Tasks()
        self._ways: dict[Action, Callable[[Order, Viewer], Awaitable[Notice]]] = {
            Action.PAUSE: self._pause,
            Action.RESUME: self._pause,
            Action.MOVE: self._move,
            Action.CANCEL: self._cancel,
            Action.CANCEL_ALL: self._cancel_all,
            Action.REPLAY: self._replay,
            Action.DISCARD: self._discard,
            Action.LOAD: self._control,
            Action.UNLOAD: self._control,
        }

    async def perform(self, order: Order, viewer: Viewer, where: str) -> Notice:
        """Do it; `where` is the viewer's address. Raises what the log raises when it does not answer."""
        try:
            notice = await self._ways[order.action](order, viewer)
        except (InvalidArgument, NotFound) as error:
            notice = Notice(False, error.message)
        except CharoniaError as error:
            self._note(order, viewer, where, f"failed: {error.message}")
            raise
        self._note(order, viewer, where, " ".join([notice.text, *notice.details]))
        return notice

    async def close(self) -> None:
        """Wait for no model any more; what was asked for goes on."""
        await self._tasks.close()

    def _note(self, order: Order, viewer: Viewer, where: str, outcome: str) -> None:
        who = f"tenant '{viewer.tenant}'" if viewer.scoped else "an operator"
        chosen = ", ".join(f"{found}.{model}" for found, model in order.chosen) or f"model '{order.model}'"
        _log.info("console: %s of %s by %s%s: %s", order.action.value, chosen, who, where and f" at {where}", outcome)

    # -- queues -------------------------------------------------------------------------------------------------------

    async def _pause(self, order: Order, _viewer: Viewer) -> Notice:
        wanted = order.action is Action.PAUSE
        done = await queues.pause(self._event_log, order.model, wanted)
        if done["was_paused"] == wanted:
            return Notice(True, f"The queue of '{order.model}' {'was paused' if wanted else 'was not paused'} before.")
        if wanted:
            return Notice(True, f"The queue of '{order.model}' is paused: nothing more of it is dispatched.")
        return Notice(True, f"The queue of '{order.model}' is served again.")

    async def _move(self, order: Order, _viewer: Viewer) -> Notice:
        ((model, ids),) = _by_model(order).items()
        if not await self._event_log.paused(model):
            raise InvalidArgument(
                f"the queue of model '{model}' is not paused, and jobs move in a paused queue alone: pause it, move "
                "them, and resume it"
            )
        done = await moving.move(self._event_log, model, ids, order.level)
        left = tuple(f"{found[:12]}… stayed: {reason}" for found, reason in done["left"].items())
        return Notice(bool(done["moved"]), f"{_counted(len(done['moved']))} moved to level {order.level}.", left)

    async def _cancel(self, order: Order, viewer: Viewer) -> Notice:
        """Jobs as `charonia jobs cancel` and the API do, an operator's other requests as `charonia queue cancel`."""
        of_jobs: list[str] = []
        others: dict[str, list[bytes]] = {}
        unknown: list[str] = []
        for model, ids in _by_model(order).items():
            for request_id in ids:
                text = public_id(model, request_id)
                job = await self._event_log.job(model, request_id)
                if job is not None and viewer.may_see(job.tenant):
                    of_jobs.append(text)
                elif job is None and not viewer.scoped:
                    others.setdefault(model, []).append(request_id)
                else:
                    unknown.append(text)
        now_ns = wall_ns()
        ending = BY_CALLER if viewer.scoped else jobs.BY_OPERATOR
        done = await jobs.cancel_jobs(self._event_log, of_jobs, None, now_ns // 1000, ending)
        cancelled, unknown = len(done["cancelled"]), unknown + done["missing"]
        details = [f"{one['id'][:12]}… had ended before: {one['state']}" for one in done["ended"]]
        for model, ids in others.items():
            found = await queues.cancel_queued(self._event_log, model, queues.Selection(frozenset(ids)), now_ns)
            cancelled += len(found["cancelled"])
            unknown += found["missing"]
            if found["ended_meanwhile"]:
                ended = _counted(found["ended_meanwhile"])
                details.append(f"{ended} of '{model}' ended meanwhile, or belong to a wave, whose requests go together")
        details += [f"{text[:12]}… is neither queued nor a job of this log" for text in unknown]
        return Notice(cancelled > 0, f"{_counted(cancelled)} cancelled.", tuple(details))

    async def _cancel_all(self, order: Order, viewer: Viewer) -> Notice:
        now_ns = wall_ns()
        if viewer.scoped:
            wanted = jobs.Filter((order.model,), tenant=viewer.tenant)
            done = await jobs.cancel_jobs(self._event_log, (), wanted, now_ns // 1000, BY_CALLER)
            return Notice(True, f"{_counted(len(done['cancelled']))} of yours of '{order.model}' cancelled.")
        done = await queues.cancel_queued(self._event_log, order.model, queues.Selection(), now_ns)
        left = done["ended_meanwhile"]
        details = (f"{_counted(left)} ended meanwhile, or go in waves, which are not cancelled",) if left else ()
        return Notice(True, f"{_counted(len(done['cancelled']))} of '{order.model}' cancelled.", details)

    # -- dead letters -------------------------------------------------------------------------------------------------

    async def _letters(self, order: Order, viewer: Viewer) -> tuple[list[dead_letters.DeadLetter], list[str]]:
        found: list[dead_letters.DeadLetter] = []
        missing: list[str] = []
        for text, model in order.chosen:
            try:
                if not _ENTRY.fullmatch(text):  # other ids are looked for among all letters, with their inputs
                    raise NotFound(text)
                (letter,) = await dead_letters.choose(self._event_log, model, (text,), every=False)
                tenant = letter.about.get("tenant")
                if not viewer.may_see(tenant if isinstance(tenant, str) else ""):
                    raise NotFound(text)
                found.append(letter)
            except NotFound:
                missing.append(
                    f"dead letter '{text[:40]}' is unknown to model '{model}': it was discarded, or has expired"
                )
        return found, missing

    async def _replay(self, order: Order, viewer: Viewer) -> Notice:
        found, details = await self._letters(order, viewer)
        links: list[tuple[str, str]] = []
        for letter in found:
            try:
                done = await dead_letters.replay(
                    self._event_log, letter, wall_ns() // 1000, dead_letters.RETENTION_S, viewer.limits
                )
            except CharoniaError as error:
                details.append(f"{letter.id.hex()[:12]}… stays as it is: {error.message}")
                continue
            job_id = done["job"].partition(".")[0]
            links.append((f"/requests/{quote(letter.model, safe='')}/{job_id}", f"job {job_id[:12]}…"))
        text = f"{_counted(len(links), 'dead letter')} submitted again; letters stay until they are discarded."
        return Notice(bool(links), text, tuple(details), tuple(links))

    async def _discard(self, order: Order, viewer: Viewer) -> Notice:
        found, missing = await self._letters(order, viewer)
        dropped = await dead_letters.drop(self._event_log, found)
        return Notice(bool(dropped), f"{_counted(len(dropped), 'dead letter')} discarded.", tuple(missing))

    # -- models -------------------------------------------------------------------------------------------------------

    async def _control(self, order: Order, _viewer: Viewer) -> Notice:
        """Load or unload as the API does; what takes long goes on while the page says so."""
        control = FollowedControl(self._event_log, poll_s=_POLL_S)
        await control.read()
        models = ModelControl(control, self._event_log, max_wait_s=_MODEL_S)
        try:
            models.check_mode()
        except Unavailable as error:
            return Notice(False, f"{error.message}: executors have to run with --model-control-mode=explicit")
        name = name_of(order.model)
        loads = order.action is Action.LOAD
        work = models.load(name, None, {}) if loads else models.unload(name, unload_dependents=order.dependents)
        task = self._tasks.spawn(self._outcome(work, order), f"{order.action.value} {name}")
        done, _ = await asyncio.wait([task], timeout=self._answer_s)
        if not done:
            return Notice(
                True,
                f"Executors were asked to {order.action.value} '{name}' and are not done after {self._answer_s:g} s: "
                "the model's versions say when they are, and why if it fails.",
            )
        if failure := task.result():
            return Notice(False, f"'{name}' was not {order.action.value}ed: {failure.message}")
        return Notice(True, f"'{name}' is {order.action.value}ed.")

    async def _outcome(self, work: Awaitable[Any], order: Order) -> CharoniaError | None:
        """Its error, or None; in the log of the process in any case, as no page may wait any more."""
        try:
            await work
        except CharoniaError as error:
            _log.warning("console: %s of model '%s' failed: %s", order.action.value, order.model, error.message)
            return error
        _log.info("console: %s of model '%s' is done", order.action.value, order.model)
        return None


def _by_model(order: Order) -> dict[str, list[bytes]]:
    """The ids of requests by model. Raises `InvalidArgument` for what is no id."""
    found: dict[str, list[bytes]] = {}
    for text, model in order.chosen:
        if not _ID.fullmatch(text):
            raise InvalidArgument(f"'{text[:40]}' is no id of a request: expected 32 hex digits")
        found.setdefault(model, []).append(bytes.fromhex(text))
    return found


def _counted(number: int, what: str = "request") -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
