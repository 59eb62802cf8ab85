"""`Client` and its jobs, which block; it carries out the steps of `procedures`. For asyncio: `async_clients`."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
import uuid
from collections.abc import Generator, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, Self, TypeVar, Unpack
from urllib.parse import quote, unquote, urlsplit

from charonia.errors import ENCODE_CREDENTIALS, CharoniaError, InvalidArgument, without_credentials

from .backoff import RetryPolicy
from .procedures import Ask, Followed, Form, Next, Open, Pause, Procedure, Procedures, Step, next_given
from .results import Inference, InferenceOptions, Inputs, JobEvent, JobStatus, Result, Tls
from .shared_region import SharedRegion

T = TypeVar("T")

SCHEMES = ("http", "https", "grpc", "grpcs", "http+unix", "grpc+unix")
_ON_SOCKETS = "+unix"
_PORTS = {"grpc": 8001, "grpcs": 8001}
ANSWER_WITHIN_S = 30.0
"""For calls that no model computes for."""
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def has_scheme(url: str) -> bool:
    """Whether a URL begins with a scheme, though it may lack the slashes behind it: http+unix:/PATH is no host and
    port, but grpc:8001 is.
    """
    scheme, _, rest = url.partition(":")
    scheme = scheme.lower()
    return (
        rest.startswith("//") or scheme.endswith(_ON_SOCKETS) or (scheme in (*SCHEMES, "unix") and rest.startswith("/"))
    )


class Address:
    """A server's URL: `http://`, `https://`, `grpc://` or `grpcs://`; without a scheme HTTP. `http+unix:///PATH` and
    `grpc+unix:///PATH` are Unix sockets, whose path is `socket`.
    """

    def __init__(self, url: str) -> None:
        self.url = url if has_scheme(url) else f"http://{url}"
        self.socket = ""
        shown = without_credentials(url)
        try:
            parts = urlsplit(self.url)
            port, host = parts.port, parts.hostname
        except ValueError:
            raise InvalidArgument(f"'{shown}' is no server: {_why(self.url)}") from None
        self.scheme = parts.scheme
        if self.scheme == "unix":
            raise InvalidArgument(f"'{shown}' names no protocol: write http+unix:///PATH or grpc+unix:///PATH")
        self.is_grpc = self.scheme.startswith("grpc")
        if self.scheme in SCHEMES and self.scheme.endswith(_ON_SOCKETS):
            self.socket = unquote(self.url[len(self.scheme) :].removeprefix("://"))
            if not self.socket.startswith("/") or self.socket.endswith("/") or "\0" in self.socket:
                raise InvalidArgument(f"'{shown}' names no Unix socket: write {self.scheme}:///PATH")
            self.target = f"unix:{quote(self.socket)}"
            return
        if self.scheme not in SCHEMES or not host:
            raise InvalidArgument(f"'{shown}' is no server: write http://HOST:PORT or grpc://HOST:PORT")
        if self.is_grpc and "@" in parts.netloc:
            raise InvalidArgument(f"'{shown}' names a user, which gRPC does not send: add a header authorization")
        self.target = parts.netloc if port else f"{parts.netloc}:{_PORTS.get(self.scheme, 8000)}"

    def form(self) -> Form:
        if self.is_grpc:
            from .grpc_form import GrpcForm

            return GrpcForm()
        from .http_form import HttpForm

        return HttpForm()


def _why(url: str) -> str:
    """Why `urlsplit` cannot read a URL: a port that is no number, brackets without an IPv6 address. Its own words may
    quote a password, as those about the port of http://user:pass/word@host do.
    """
    try:
        _ = urlsplit(without_credentials(url)).port
    except ValueError as error:
        return str(error)
    return ENCODE_CREDENTIALS


def trace_headers() -> dict[str, str]:
    """The context of the current span, where the program uses OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry.propagate import inject

    carrier: dict[str, str] = {}
    inject(carrier)
    return carrier


class Connecting:
    """What both clients are made of: where the server is and how it is asked."""

    def __init__(
        self,
        url: str = "http://localhost:8000",
        *,
        headers: Mapping[str, str] = _NO_HEADERS,
        retry: RetryPolicy | None = None,
        connections: int = 64,
        tls: Tls | None = None,
    ) -> None:
        """`headers` go with every request, such as `Authorization`; `connections` bounds the pool of HTTP connections.

        Nothing is sent yet. Raises `InvalidArgument` for a URL that names no server.
        """
        self._address = Address(url)
        self.url = self._address.url
        self.is_grpc = self._address.is_grpc
        self._headers = dict(headers)
        self._connections = connections
        self._tls = tls
        self._form = self._address.form()
        self._procedures = Procedures(
            self._form, retry or RetryPolicy(), time.monotonic, random.random, lambda: uuid.uuid4().hex
        )
        self._made: Transport | None = None
        self._making = threading.Lock()

    @property
    def _transport(self) -> Transport:
        """Made when it is first needed: one for asyncio belongs to the running loop."""
        with self._making:
            if self._made is None:
                self._made = self._open()
            return self._made

    def _open(self) -> Transport:
        raise NotImplementedError


class Transport(Protocol):
    def exchange(self, call: Any, timeout_s: float | None, headers: Mapping[str, str]) -> Any: ...
    def stream(self, call: Any, timeout_s: float | None, left_s: float | None, headers: Mapping[str, str]) -> Any: ...
    def close(self) -> Any: ...


class _Reader:
    """Carries out steps over a blocking transport; it has at most one open stream."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._read: Any = None
        self._stream: Any = None

    def run(self, procedure: Procedure[T]) -> T:
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
                outcome = self._perform(step)
            except CharoniaError as raised:
                error = raised

    def _perform(self, step: Step) -> Any:
        match step:
            case Ask(exchange, timeout_s):
                return exchange.read(self._transport.exchange(exchange.call, timeout_s, trace_headers()))
            case Pause(seconds):
                time.sleep(seconds)
            case Open(exchange, timeout_s, left_s):
                self.close()
                self._read = exchange.read
                self._stream = self._transport.stream(exchange.call, timeout_s, left_s, trace_headers())
            case Next():
                for raw in self._stream:
                    if (value := self._read(raw)) is not None:
                        return value
        return None

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class Client(Connecting):
    """A blocking client, which may be used from several threads. Close it, or use it in a `with`."""

    def _open(self) -> Transport:
        address = self._address
        if address.is_grpc:
            from .grpc_transport import GrpcTransport

            return GrpcTransport(address.target, address.scheme == "grpcs", self._headers, self._tls)
        from .http_transport import HttpTransport

        return HttpTransport(address.url, address.socket, self._connections, self._headers, self._tls)

    def infer(self, model: str, inputs: Inputs, **options: Unpack[InferenceOptions]) -> Result:
        """The answer to an inference; `InferenceOptions` says what else it may ask.

        Raises the class of `charonia.errors` that the server's answer stands for.
        """
        inference = Inference.of(model, inputs, options)
        return self._run(self._procedures.infer(inference, options.get("timeout_s")))

    def submit(self, model: str, inputs: Inputs, **options: Unpack[InferenceOptions]) -> Job:
        """Make an inference a job, accepted once however often the submission had to be repeated."""
        inference = Inference.of(model, inputs, options)
        status = self._run(self._procedures.submit(inference, options.get("timeout_s")))
        return Job(self, status.id, status)

    def stream(
        self, model: str, inputs: Inputs, *, resume: bool | None = None, **options: Unpack[InferenceOptions]
    ) -> Generator[Result]:
        """The responses of a model as they come. The first that is an error is raised.

        With `resume` (by default where the server is Charonia) they come from a job, and go on behind the last one
        after a lost connection. Leaving the iteration cancels the request.
        """
        inference = Inference.of(model, inputs, options)
        followed = Followed()
        procedure = self._procedures.stream(inference, options.get("timeout_s"), followed, resume)
        try:
            yield from self._iterate(procedure)
        finally:
            if followed.job_id and not followed.ended:
                self._run(self._procedures.abandon(followed.job_id))

    def job(self, job_id: str) -> Job:
        """The job of this id; nothing is asked yet."""
        return Job(self, job_id)

    def live(self, *, timeout_s: float | None = ANSWER_WITHIN_S) -> bool:
        """Whether the server runs."""
        return self._run(self._procedures.question(self._form.live(), timeout_s))

    def ready(self, model: str = "", version: str = "", *, timeout_s: float | None = ANSWER_WITHIN_S) -> bool:
        """Whether the server, or a model, takes requests."""
        return self._run(self._procedures.question(self._form.ready(model, version), timeout_s))

    def metadata(
        self, model: str = "", version: str = "", *, timeout_s: float | None = ANSWER_WITHIN_S
    ) -> dict[str, Any]:
        """Of the server, or of a model: its inputs and outputs."""
        return self._run(self._procedures.question(self._form.metadata(model, version), timeout_s))

    def config(self, model: str, version: str = "", *, timeout_s: float | None = ANSWER_WITHIN_S) -> dict[str, Any]:
        """The configuration of a model, of servers with Triton's extension, as JSON has it over HTTP."""
        return self._run(self._procedures.question(self._form.config(model, version), timeout_s))

    def models(self, *, timeout_s: float | None = ANSWER_WITHIN_S) -> list[dict[str, Any]]:
        """The models of the repository, each with name, version, state and reason."""
        return self._run(self._procedures.question(self._form.index(), timeout_s))

    def statistics(
        self, model: str = "", version: str = "", *, timeout_s: float | None = ANSWER_WITHIN_S
    ) -> list[dict[str, Any]]:
        """Of each model version, or of those that are named."""
        return self._run(self._procedures.question(self._form.statistics(model, version), timeout_s))

    @contextlib.contextmanager
    def shared_memory(self, size_bytes: int) -> Generator[SharedRegion]:
        """A region of shared memory, registered with a server on this machine for the length of a block."""
        region = SharedRegion(size_bytes)
        try:
            self._run(self._procedures.once(self._form.register(region.name, region.key, size_bytes), ANSWER_WITHIN_S))
            try:
                yield region
            finally:
                self._run(self._procedures.question(self._form.unregister(region.name), ANSWER_WITHIN_S))
        finally:
            region.unlink()

    def close(self) -> None:
        """Close all connections."""
        if self._made is not None:
            self._made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, procedure: Procedure[T]) -> T:
        return _Reader(self._transport).run(procedure)

    def _iterate(self, procedure: Procedure[None]) -> Generator[Any]:
        reader = _Reader(self._transport)
        with contextlib.closing(reader), contextlib.closing(procedure):
            while (value := reader.run(next_given(procedure))) is not None:
                yield value


class Job:
    """A job of Charonia. `receipt` is what the server said of it when it was accepted, None for one made by its id."""

    def __init__(self, client: Client, job_id: str, receipt: JobStatus | None = None) -> None:
        self._client = client
        self._procedures = client._procedures
        self.id = job_id
        self.receipt = receipt

    def status(self, *, timeout_s: float | None = ANSWER_WITHIN_S) -> JobStatus:
        """Where it is (over HTTP only)."""
        return self._client._run(self._procedures.job(self.id, timeout_s))

    def result(self, timeout_s: float | None = None) -> Result:
        """Its answer, waited for. Raises the error it ended with, and `JobNotEnded` after `timeout_s`."""
        return self._client._run(self._procedures.result(self.id, timeout_s))

    def results(self, timeout_s: float | None = None) -> list[Result]:
        """All answers of a job whose model may answer more than once (over HTTP), as `result`."""
        return self._client._run(self._procedures.results(self.id, timeout_s))

    def cancel(self, *, timeout_s: float | None = ANSWER_WITHIN_S) -> JobStatus:
        """Its state afterwards: `cancelled`, or how it had ended before."""
        return self._client._run(self._procedures.cancel(self.id, timeout_s))

    def events(self, after: str = "", *, timeout_s: float | None = None) -> Generator[JobEvent]:
        """What happens to it, up to its end, over as many connections as it takes (over HTTP only).

        `after` is the `place` of the last event that was seen.
        """
        yield from self._client._iterate(self._procedures.events(self.id, after, timeout_s))

    def responses(self, *, timeout_s: float | None = None) -> Generator[Result]:
        """Its model's responses from the first on, as they come."""
        yield from self._client._iterate(self._procedures.responses(self.id, timeout_s))
