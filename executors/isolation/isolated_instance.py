"""A native model in its own process: `parameters: charonia.isolation = "process"`.

To the executor it is a `BatchInstance`; its arrays are sent to the process and back. A crash or a hang costs this
instance instead of the executor. `isolated_process` runs there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from multiprocessing.connection import Connection

from charonia.backend import Array, BatchInstance, InstanceDied, InstanceSpec, ModelSource, RequestInstance
from charonia.errors import CharoniaError, InternalError, InvalidArgument
from executors.configuration.time_parameters import MAX_EXECUTION
from executors.host.output import OutputLines

from .isolated_exchange import CLOSE, DONE, EXECUTE, FAILED, READY, Message, pack_message, pack_spec, receive

ISOLATION = "charonia.isolation"

_CLOSE_S = 10.0
_END_S = 1.0
_LOAD_S = 300.0

CreateInstance = Callable[[InstanceSpec], Awaitable[BatchInstance | RequestInstance]]


def wants_process(source: ModelSource) -> bool:
    """Whether a model's instances run in their own processes. Raises `InvalidArgument` for an unknown value."""
    if ISOLATION not in source.config.parameters:
        return False
    word = source.config.parameters[ISOLATION].string_value
    if word not in ("process", "none"):
        raise InvalidArgument(f"'{ISOLATION}' of model '{source.name}' must be \"process\" or \"none\", got '{word}'")
    return word == "process"


async def create_isolated(spec: InstanceSpec, ceiling_s: float) -> BatchInstance:
    """Start a process and load the model in it. Raises a `CharoniaError` with the reason."""
    # started in this thread, not in a pool's: the process dies with the thread that started it
    instance = IsolatedInstance(spec, ceiling_s)
    await asyncio.to_thread(instance.load, spec)
    return instance


class IsolatedInstance:
    """A `BatchInstance` in another process. Call `load` first; calls block and are made one at a time.

    An execution longer than `ceiling_s` seconds (0: no limit) ends the process.
    """

    def __init__(self, spec: InstanceSpec, ceiling_s: float = 0.0) -> None:
        self.name = spec.name
        self.stateless = False
        self._ceiling_s = ceiling_s
        self._killed = ""
        self._output = OutputLines(f"[{spec.source.name}/{spec.name}] ", _write_to_stderr)
        ours, theirs = socket.socketpair()
        title = f"charonia-instance:{spec.source.name}:{spec.name}"
        with theirs:
            words = (title, str(theirs.fileno()), str(os.getpid()))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "executors.isolation.isolated_process", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
            )
        self._connection = Connection(ours.detach())
        self._reading = threading.Thread(target=self._read_output, name=f"output of {spec.name}", daemon=True)
        self._reading.start()

    def load(self, spec: InstanceSpec) -> None:
        """Load the model. Raises a `CharoniaError` with the reason, after ending the process."""
        try:
            answer = self._call(pack_spec(spec), _LOAD_S, "it did not load in time")
        except InstanceDied as death:
            raise InternalError(f"{death}\n{death.stderr}".rstrip()) from None
        except CharoniaError:
            self.close()
            raise
        self.stateless = bool(answer.detail)

    @property
    def pid(self) -> int:
        """The id of the model's process."""
        return self._process.pid

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """See `BatchInstance.execute`. Raises `InstanceDied` when the process has ended or was too slow."""
        reason = f"it ran longer than {self._ceiling_s:g} s ({MAX_EXECUTION})"
        return self._call(pack_message(EXECUTE, list(outputs), inputs), self._ceiling_s, reason).arrays

    def close(self) -> None:
        """Unload the model and end its process, by force after some seconds. A second call does nothing."""
        if self._connection.closed:
            return
        try:
            self._call(pack_message(CLOSE, None, {}), _CLOSE_S, "it did not close in time")
        except (InstanceDied, CharoniaError, OSError):
            self._end("it did not close")
        self._connection.close()
        self._wait()

    def _call(self, message: Sequence[bytes], within_s: float, reason: str) -> Message:
        try:
            for part in message:
                self._connection.send_bytes(part)
            if within_s and not self._connection.poll(within_s):
                self._end(reason)
                raise EOFError
            answer = receive(self._connection)
        except (EOFError, OSError):
            raise self._death() from None
        if answer.kind == FAILED:
            code, text = answer.detail
            raise CharoniaError.of(code, text)
        if answer.kind not in (READY, DONE):
            self._end("it does not keep to the protocol")
            raise self._death()
        return answer

    def _end(self, reason: str) -> None:
        self._killed = self._killed or reason
        self._process.kill()

    def _wait(self) -> None:
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reading.join(_END_S)  # child processes of the model may keep the pipe open
        self._output.end()

    def _death(self) -> InstanceDied:
        self._wait()
        code = self._process.returncode
        if self._killed:
            how = f"was killed: {self._killed}"
        elif code < 0:
            how = f"was ended by signal {-code} ({_signal_name(-code)})"
        else:
            how = f"exited with code {code}"
        text = f"Stub process '{self.name}' is not healthy. The process (pid {self._process.pid}) {how}."
        return InstanceDied(text, self._output.last_lines(), blameless=code == -signal.SIGTERM)

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while data := output.read1(1 << 16):  # type: ignore[attr-defined]
                self._output.feed(data)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _write_to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
