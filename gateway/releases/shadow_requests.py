"""Sends copies of requests to a shadow version, compares its answers with those that callers got, and counts.

A copy leaves once the request is answered, in a task that no caller waits for, and its answer is thrown away. There are
few at a time: while these run, further requests are not copied but counted as skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from charonia import keys
from charonia.catalog.catalog import ServedVersion
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, ErrorCode
from charonia.eventlog.port import Statistics
from charonia.inference import LOWEST_PRIORITY, InferenceRequest
from charonia.releases.answer_comparison import differing
from charonia.releases.route_rule import RouteRule
from charonia.tasks import Tasks
from charonia.tensors import Tensor
from charonia.wire import ResponseRecord

MAX_IN_FLIGHT = 16
"""Copies of one gateway under way: few beside its requests."""
MAX_SIZE_BYTES = 16 << 20
"""Inputs and answers that copies hold in memory."""
_PATIENCE_NS = 30_000_000_000
_FLUSH_S = 1.0
_LARGE_BYTES = 65_536
"""Larger answers are compared in a thread."""

_log = logging.getLogger(__name__)

_NOT_ASKED = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.RESOURCE_EXHAUSTED})
"""Errors of a log that cannot be reached, of full queues and of a version that is just leaving: not the version's."""

Send = Callable[[InferenceRequest], Awaitable[ResponseRecord]]
"""Admits and sends a request to its `served` version; returns the answer."""


class ShadowRequests:
    """The copies of one gateway."""

    def __init__(self, log: Statistics, send: Send) -> None:
        self._log = log
        self._send = send
        self._tasks = Tasks()
        self._flushing = Tasks()
        self._timer: asyncio.TimerHandle | None = None
        self._unsent: dict[bytes, dict[str, int]] = {}
        self._size_bytes = 0
        self._is_draining = False
        self.counts: dict[tuple[str, str], int] = {}
        """By model and result: same, different, failed, skipped."""

    def copy(
        self, request: InferenceRequest, shadow: ServedVersion, rule: RouteRule, outputs: Sequence[Tensor]
    ) -> None:
        """Ask the shadow what a caller has asked; `outputs` is the answer that the caller got.

        The copy has the lowest priority of the version, and no tenant: the caller's bounds and bill are for what the
        caller has asked.
        """
        if self._is_draining:
            return
        size = sum(len(tensor.data) for tensor in (*request.inputs, *outputs))
        if len(self._tasks) >= MAX_IN_FLIGHT or self._size_bytes + size > MAX_SIZE_BYTES:
            self._count(shadow, "skipped")
            return
        copied = replace(
            request,
            served=shadow,
            headers=None,
            trace=None,
            id="",
            priority=LOWEST_PRIORITY,
            deadline_ns=wall_ns() + _PATIENCE_NS,
            timeout_us=0,
        )
        self._size_bytes += size
        self._tasks.spawn(self._compare(copied, shadow, dict(rule.tolerances), outputs, size), "a shadow's copy")

    async def _compare(
        self,
        request: InferenceRequest,
        shadow: ServedVersion,
        tolerances: Mapping[str, float],
        outputs: Sequence[Tensor],
        size_bytes: int,
    ) -> None:
        try:
            record = await self._send(request)
            if record.error is not None:
                self._count(shadow, _result_of(record.error))
                return
            answer = [tensor for tensor in record.outputs if not request.outputs or tensor.name in request.outputs]
            if size_bytes > _LARGE_BYTES:
                found = await asyncio.to_thread(differing, outputs, answer, tolerances)
            else:
                found = differing(outputs, answer, tolerances)
            self._count(shadow, "different" if found else "same", *(f"different in {name}" for name in found))
        except CharoniaError as error:
            self._count(shadow, _result_of(error))
        except Exception:
            _log.exception("an answer of a shadow could not be compared")
            self._count(shadow, "failed")
        finally:
            self._size_bytes -= size_bytes

    def _count(self, shadow: ServedVersion, result: str, *more: str) -> None:
        self.counts[shadow.model, result] = self.counts.get((shadow.model, result), 0) + 1
        counts = self._unsent.setdefault(keys.shadow_counts(shadow.model, shadow.version), {})
        for name in (result, *more):
            counts[name] = counts.get(name, 0) + 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self._flush_soon)

    def _flush_soon(self) -> None:
        self._timer = None
        self._flushing.spawn(self.flush(), "counts of shadows")

    async def flush(self) -> None:
        """Write the counts; what the log does not take is lost, as it is only a report."""
        unsent, self._unsent = self._unsent, {}
        with contextlib.suppress(CharoniaError):
            for key, counts in unsent.items():
                await self._log.add_statistics(key, counts)

    def begin_drain(self) -> None:
        """End the copies that run, and make no more: no caller waits for one. What ends here is not counted."""
        self._is_draining = True
        self._tasks.cancel()

    async def close(self) -> None:
        """End the copies that run, and write the counts."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._tasks.close()
        await self._flushing.close()
        await self.flush()

    async def settled(self) -> None:
        """Returns when no copy runs."""
        await self._tasks.settled()


def _result_of(error: CharoniaError) -> str:
    """As what a copy with this error is counted."""
    return "skipped" if error.code in _NOT_ASKED else "failed"
