"""`AsyncClient` and its jobs, for asyncio: the calls of `clients`, awaited."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from charonia.errors import CharoniaError

from .clients import ANSWER_WITHIN_S, Connecting, Transport, trace_headers
from .procedures import Ask, Followed, Next, Open, Pause, Procedure, Step, next_given
from .results import Inference, InferenceOptions, Inputs, JobEvent, JobStatus, Result
from .shared_region import SharedRegion

T = TypeVar("T")


class _AsyncReader:
    """Carries out steps over a transport for asyncio; it has at most one open stream."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._read: Any = None
        self._stream: Any = None

    async def run(self, procedure: Procedure[T]) -> T:
        outcome: Any = None
        error: CharoniaError | None = None
        while True:
            try:
                step = procedure.send(outcome) if error is None else procedure.throw(error)
            except StopIteration as end:
                result: T = end.value
                return result
            outcome, error = None, None
            try:
                outcome = await self._perform(step)
            except CharoniaError as raised:
                error = raised

    async def _perform(self, step: Step) -> Any:
        match step:
            case Ask(exchange, timeout_s):
                return exchange.read(await self._transport.exchange(exchange.call, timeout_s, trace_headers()))
            case Pause(seconds):
                await asyncio.sleep(seconds)
            case Open(exchange, timeout_s, left_s):
                await self.aclose()
                self._read = exchange.read
                self._stream = self._transport.stream(exchange.call, timeout_s, left_s, trace_headers())
            case Next():
                async for raw in self._stream:
                    if (value := self._read(raw)) is not None:
                        return value
        return None

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()
            self._stream = None


class AsyncClient(Connecting):
    """`Client` for asyncio, to be used in one event loop. Close it, or use it in an `async with`."""

    def _open(self) -> Transport:
        address = self._address
        if address.is_grpc:
            from .grpc_transport import AsyncGrpcTransport

            return AsyncGrpcTransport(address.target, address.scheme == "grpcs", self._headers, self._tls)
        from .http_transport import AsyncHttpTransport

        return AsyncHttpTransport(address.url, address.socket, self._connections, self._headers, self._tls)

    async def infer(self, model: str, inputs: Inputs, **options: Unpack[InferenceOptions]) -> Result:
        """As `Client.infer`."""
        inference = Inference.of(model, inputs, options)
        return await self._run(self._procedures.infer(inference, options.get("timeout_s")))

    async def submit(self, model: str, inputs: Inputs, **options: Unpack[InferenceOptions]) -> AsyncJob:
        """As `Client.submit`."""
        inference = Inference.of(model, inputs, options)
        status = await self._run(self._procedures.submit(inference, options.get("timeout_s")))
        return AsyncJob(self, status.id, status)

    async def stream(
        self, model: str, inputs: Inputs, *, resume: bool | None = None, **options: Unpack[InferenceOptions]
    ) -> AsyncGenerator[Result]:
        """As `Client.stream`; one that is left early is cancelled once it is closed (`contextlib.aclosing`)."""
        inference = Inference.of(model, inputs, options)
        followed = Followed()
        procedure = self._procedures.stream(inference, options.get("timeout_s"), followed, resume)
        try:
            async with contextlib.aclosing(self._iterate(procedure)) as results:
                async for result in results:
                    yield result
        finally:
            if followed.job_id and not followed.ended:
                await self._run(self._procedures.abandon(followed.job_id))

    def job(self, job_id: str) -> AsyncJob:
        """The job of this id; nothing is asked yet."""
        return AsyncJob(self, job_id)

    async def live(self, *, timeout_s: float | None = ANSWER_WITHIN_S) -> bool:
        """Whether the server runs."""
        return await self._run(self._procedures.question(self._form.live(), timeout_s))

    async def ready(self, model: str = "", version: str = "", *, timeout_s: float | None = ANSWER_WITHIN_S) -> bool:
        """As `Client.ready`."""
        return await self._run(self._procedures.question(self._form.ready(model, version), timeout_s))

    async def metadata(
        self, model: str = "", version: str = "", *, timeout_s: float | None = ANSWER_WITHIN_S
    ) -> dict[str, Any]:
        """As `Client.metadata`."""
        return await self._run(self._procedures.question(self._form.metadata(model, version), timeout_s))

    async def config(
        self, model: str, version: str = "", *, timeout_s: float | None = ANSWER_WITHIN_S
    ) -> dict[str, Any]:
        """As `Client.config`."""
        return await self._run(self._procedures.question(self._form.config(model, version), timeout_s))

    async def models(self, *, timeout_s: float | None = ANSWER_WITHIN_S) -> list[dict[str, Any]]:
        """As `Client.models`."""
        return await self._run(self._procedures.question(self._form.index(), timeout_s))

    async def statistics(
        self, model: str = "", version: str = "", *, timeout_s: float | None = ANSWER_WITHIN_S
    ) -> list[dict[str, Any]]:
        """As `Client.statistics`."""
        return await self._run(self._procedures.question(self._form.statistics(model, version), timeout_s))

    @contextlib.asynccontextmanager
    async def shared_memory(self, size_bytes: int) -> AsyncGenerator[SharedRegion]:
        """As `Client.shared_memory`."""
        region = SharedRegion(size_bytes)
        try:
            await self._run(
                self._procedures.once(self._form.register(region.name, region.key, size_bytes), ANSWER_WITHIN_S)
            )
            try:
                yield region
            finally:
                await self._run(self._procedures.question(self._form.unregister(region.name), ANSWER_WITHIN_S))
        finally:
            region.unlink()

    async def close(self) -> None:
        """Close all connections."""
        if self._made is not None:
            await self._made.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, procedure: Procedure[T]) -> T:
        return await _AsyncReader(self._transport).run(procedure)

    async def _iterate(self, procedure: Procedure[None]) -> AsyncGenerator[Any]:
        reader = _AsyncReader(self._transport)
        async with contextlib.aclosing(reader):
            with contextlib.closing(procedure):
                while (value := await reader.run(next_given(procedure))) is not None:
                    yield value


class AsyncJob:
    """`Job` for asyncio."""

    def __init__(self, client: AsyncClient, job_id: str, receipt: JobStatus | None = None) -> None:
        self._client = client
        self._procedures = client._procedures
        self.id = job_id
        self.receipt = receipt

    async def status(self, *, timeout_s: float | None = ANSWER_WITHIN_S) -> JobStatus:
        """As `Job.status`."""
        return await self._client._run(self._procedures.job(self.id, timeout_s))

    async def result(self, timeout_s: float | None = None) -> Result:
        """As `Job.result`."""
        return await self._client._run(self._procedures.result(self.id, timeout_s))

    async def results(self, timeout_s: float | None = None) -> list[Result]:
        """As `Job.results`."""
        return await self._client._run(self._procedures.results(self.id, timeout_s))

    async def cancel(self, *, timeout_s: float | None = ANSWER_WITHIN_S) -> JobStatus:
        """As `Job.cancel`."""
        return await self._client._run(self._procedures.cancel(self.id, timeout_s))

    async def events(self, after: str = "", *, timeout_s: float | None = None) -> AsyncGenerator[JobEvent]:
        """As `Job.events`."""
        async with contextlib.aclosing(
            self._client._iterate(self._procedures.events(self.id, after, timeout_s))
        ) as events:
            async for event in events:
                yield event

    async def responses(self, *, timeout_s: float | None = None) -> AsyncGenerator[Result]:
        """As `Job.responses`."""
        async with contextlib.aclosing(
            self._client._iterate(self._procedures.responses(self.id, timeout_s))
        ) as responses:
            async for response in responses:
                yield response
