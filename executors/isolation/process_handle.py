"""The executor's side of the process of an isolated model: starts and ends it, and says whose fault its end is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from charonia.backend import InstanceDied, ModelSource
from charonia.errors import CharoniaError, InternalError
from executors.backends.python.child_process import ChildProcess
from executors.backends.python.custom_metrics import Board
from executors.backends.python.frame_content import failure_of
from executors.backends.python.model_environments import (
    ENVIRONMENT,
    Interpreter,
    environment_path,
    environment_python,
    environment_variables,
)
from executors.backends.python.protocol.frames import Frame, Kind
from executors.configuration.time_parameters import parameter_seconds
from executors.host import owned_folders

from .forms import MAX_FRAME_BYTES, source_content

_START_S = 60.0
_BULK_START_S = 180.0
"""It starts at a lower priority already."""
_LOAD_S = 600.0
_LOAD_PARAMETER = "charonia.max_load_s"
_KEPT = ("PATH", "LANG", "LANGUAGE", "TZ", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH")
_KEPT_PREFIXES = (
    *("LC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "MALLOC_", "GLIBC_", "PYTHON"),
    *("CUDA_", "NVIDIA_", "NCCL_", "TORCH_", "PYTORCH_", "AOTI_", "TF_", "XLA_", "ORT_", "OV_", "OPENVINO_", "ONNX"),
)
"""The environment that a sandboxed process keeps: what libraries read. Credentials of the server are not in it."""


class ModelProcess(ChildProcess):
    """A process with one loaded model; made by `start`."""

    _max_frame_bytes = MAX_FRAME_BYTES

    passing: socket.socket
    """Descriptors of new instances are sent over it, before the CREATE that they belong to."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ended = threading.Event()
        """Set when the process is gone, and `dead` says how."""
        self.executing: set[object] = set()
        """The instances that run something now. Each changes only its own membership, in any thread."""
        self.busy: dict[object, Callable[[], bool]] = {}
        """By instance whose calls are made in the event loop: whether it has any under way."""
        self.on_end: set[Callable[[], None]] = set()
        """Called in the event loop when the process is gone."""
        self.may_call = False
        """Whether calls of models that come over this socket are answered."""
        self._suspects: set[object] = set()
        self._culprit: object | None = None

    @staticmethod
    async def start(
        source: ModelSource, *, sandboxed: bool, board: Board | None = None, in_bulk: bool = False
    ) -> ModelProcess:
        """Start a process and load a model in it. It writes its metrics to `board`, which is closed when it ends.

        `in_bulk`: it has a lower priority and long time slices (docs/adr/0048), and ends first where memory is short.

        Raises a `CharoniaError` with the reason.
        """
        folder = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                # a sandboxed process may write to this folder alone; one without a sandbox to /tmp as any process does
                folder = await _make_folder() if sandboxed else None
                temporary = str(folder or "")
                readable = [str(source.directory.resolve())]
                told = {"sandboxed": sandboxed, "readable": readable, "temporary": temporary, "in_bulk": in_bulk}
                policy = json.dumps(told)
                python, environment = await asyncio.to_thread(_python, source, temporary, sandboxed)
                command = (*python, "-m", "executors.isolation.child.process_entry", policy, str(theirs.fileno()))
                process = await ModelProcess.spawn(
                    *(source.name, source.name, Interpreter(command, environment)),
                    start_timeout_s=_BULK_START_S if in_bulk else _START_S,
                    board=board,
                    passed=[theirs.fileno()],
                )
        except BaseException as failure:
            ours.close()
            if board is not None:
                board.close(died=False)
            _remove(folder)
            if isinstance(failure, InstanceDied):
                raise load_error(failure) from None
            if isinstance(failure, OSError):
                raise InternalError(f"the process of model '{source.name}' cannot be started: {failure}") from failure
            raise
        process.passing = ours
        process.on_end.add(ours.close)
        process.on_end.add(lambda: _remove(folder))
        await process.load_call(source, Kind.LOAD, source_content(source))
        return process

    async def load_call(self, source: ModelSource, kind: Kind, content: Any) -> Any:
        """Make a call that loads something, and return the content of its answer; a LOAD that fails ends the process.

        Raises a `CharoniaError`.
        """
        limit_s = parameter_seconds(source, _LOAD_PARAMETER, _LOAD_S)
        try:
            frame: Frame = await self.call(kind, content, ceiling_s=limit_s, ceiling=_LOAD_PARAMETER)
            if frame.kind is Kind.FAILED:
                raise failure_of(frame)
            return frame.content()
        except InstanceDied as death:
            raise load_error(death) from None
        except BaseException as error:
            if kind is Kind.LOAD:
                failed = isinstance(error, CharoniaError)
                self.kill("its model cannot be loaded" if failed else "the load was cancelled")
            raise

    def death_of(self, instance: object) -> InstanceDied:
        """How the process ended, for what this instance was doing: its fault, perhaps its fault, or not."""
        death = self.dead
        assert death is not None
        suspects = self._suspects if self._culprit is None else {self._culprit}
        suspected = instance in suspects
        return InstanceDied(
            str(death),
            death.stderr,
            blameless=death.blameless or not suspected,
            shared=suspected and (death.shared or len(suspects) > 1),
        )

    def kill_for(self, instance: object, reason: str) -> None:
        """Kill the process because of what this instance is doing."""
        if self.dead is None and self._culprit in (None, instance):
            self._culprit = instance
            self.kill(reason)

    def blame(self, instance: object, reason: str) -> None:
        """Say that the process will be killed because of what this instance is doing, and have it print where it is."""
        if self.dead is None and self._culprit is None:
            self._culprit = instance
            self._print_tracebacks(reason)

    def excuse(self, instance: object) -> None:
        """Withdraw what `blame` said, unless the process is killed already."""
        if self._culprit is instance and not self._killed:
            self._culprit = None
            self._withdraw_reason()

    def kill(self, reason: str) -> None:
        super().kill(reason)
        self._kill_group()

    def _kill_group(self) -> None:
        """End what the process has started. The group has its id; it begins with making the group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _end(self, death: InstanceDied) -> None:
        self._suspects = self.executing | {instance for instance, is_busy in self.busy.items() if is_busy()}
        self._kill_group()
        super()._end(death)
        self.ended.set()
        for called in list(self.on_end):
            called()


def load_error(death: InstanceDied) -> CharoniaError:
    """The error of a load that a process did not survive."""
    lines = f" Its last lines:\n{death.stderr}" if death.stderr else ""
    return InternalError(f"{death}{lines}")


def _python(source: ModelSource, temporary: str, sandboxed: bool) -> tuple[tuple[str, ...], Mapping[str, str] | None]:
    """The interpreter for a model and its variables (None: ours). It is started before the sandbox is entered.

    That of an environment of the model's own is machine code; Charonia and the backend are installed there.
    """
    variables = _environment(temporary) if sandboxed else None
    path = environment_path(source)
    if path is None:
        return (sys.executable, "-P"), variables
    source.check_native_code(f"an interpreter, '{ENVIRONMENT}' {path}")
    found = environment_python(source)
    assert found is not None
    root, python = found
    return (str(python), "-I"), environment_variables(root, os.environ if variables is None else variables)


def _environment(temporary: str) -> Mapping[str, str]:
    kept = {key: value for key, value in os.environ.items() if key in _KEPT or key.startswith(_KEPT_PREFIXES)}
    return kept | {"HOME": temporary, "TMPDIR": temporary, "XDG_CACHE_HOME": str(Path(temporary) / "cache")}


async def _make_folder() -> Path:
    """Make a folder. Where the caller is cancelled meanwhile, the thread makes it all the same, and it is removed."""
    making = asyncio.get_running_loop().run_in_executor(None, owned_folders.make)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(lambda made: _remove(None if made.exception() else made.result()))
        raise


def _remove(folder: Path | None) -> None:
    if folder is not None:
        # the executor may end at once: it waits for such a thread
        threading.Thread(target=owned_folders.remove, args=(folder,)).start()
