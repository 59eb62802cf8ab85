"""The entry point of the `python` backend: starts the processes of models, and loads the models in them.

`python_instance` executes requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from charonia.backend import Backend, Format, InstanceDied, InstanceSpec, Model, ModelSource
from charonia.errors import CharoniaError, InternalError
from charonia.models.config_forms import to_json
from executors.configuration.autocomplete import invalid_result, merge
from protos.model_config_pb2 import ModelConfig

from .child_process import ChildProcess
from .custom_metrics import Board, CustomMetrics
from .frame_content import failure_of
from .model_environments import interpreter
from .process_settings import Limits, code_file, mentions
from .protocol.frames import Frame, Kind
from .protocol.shared_slots import ExecutorSlots
from .python_instance import PythonInstance

_log = logging.getLogger(__name__)


class PythonBackend(Backend):
    """Makes instances, each with its own process (P1), and renders the metrics of all."""

    name = "python"
    api = (1, 0)
    formats = (Format(files=("model.py",)),)

    def __init__(self) -> None:
        self._metrics = CustomMetrics()

    def render_metrics(self) -> bytes:
        """Return the models' custom metrics in the text format (P16)."""
        return self._metrics.render()

    async def load(self, source: ModelSource) -> PythonModel:
        """Return the model; each of its instances runs its code in a process of its own."""
        return PythonModel(source, self._metrics)


class PythonModel(Model):
    """One load of a python model's version. Its instances share nothing."""

    def __init__(self, source: ModelSource, metrics: CustomMetrics) -> None:
        self._source = source
        self._metrics = metrics

    async def signature(self) -> ModelConfig | None:
        """Return the configuration completed by the model's `auto_complete_config`; None if it has none (P2).

        Raises `InternalError` with what the model raised, conflicts included; `InstanceError` for conflicts that the
        model's process did not detect.
        """
        source = self._source
        text = await completed_config(source)
        if text is None:
            return None
        try:
            document = json.loads(text)
        except ValueError as error:
            raise InternalError(f"{invalid_result(source.name)} {error}") from error
        return merge(source.config, document)

    async def create_instance(self, spec: InstanceSpec) -> PythonInstance:
        """Load the model in a new process. Raises a `CharoniaError` whose text is the reason (P3, P12)."""
        return await load_instance(spec, self._metrics)


async def load_instance(spec: InstanceSpec, metrics: CustomMetrics) -> PythonInstance:
    """Start a process and initialise the model in it. Raises a `CharoniaError` with the reason (P3)."""
    source = spec.source
    limits = Limits.of(source)
    answers_later = await asyncio.to_thread(mentions, source, "get_response_sender")
    content = {
        "location": location(source),
        "args": initialize_args(spec),
        "outputs": list(spec.interface.outputs),
        "answers_later": answers_later,
    }
    slots = None if spec.interface.decoupled else _slots()
    child = await _spawn(source, spec.name, limits, spec.cores, metrics.open(source), slots)
    instance = PythonInstance(child, limits, source.name, spec.calls)
    instance.decoupled = spec.interface.decoupled
    frame = await _load_call(child, Kind.INITIALIZE, content, limits)
    if frame.kind is Kind.FAILED:
        await child.close(limits.finalize_s)
        raise failure_of(frame)
    instance.checks_health = frame.content() is True
    instance.answers_later = answers_later
    return instance


async def completed_config(source: ModelSource) -> str | None:
    """Return the result of the model's `auto_complete_config` as JSON text; None if it has no such function (P2)."""
    limits = Limits.of(source)
    child = await _spawn(source, f"{source.name}_autocomplete", limits)
    content = {"location": location(source), "config": json.dumps(to_json(source.config))}
    try:
        frame = await _load_call(child, Kind.AUTO_COMPLETE, content, limits)
        if frame.kind is Kind.FAILED:
            raise failure_of(frame)
        completed = frame.content()
        return completed if completed is None else str(completed)
    finally:
        await child.close(limits.finalize_s)


def location(source: ModelSource) -> list[str]:
    """The location of the model's code, for the model process."""
    return [source.name, str(source.version), str(source.directory.absolute()), str(code_file(source))]


def initialize_args(spec: InstanceSpec) -> dict[str, str]:
    """The `args` of `initialize`: strings only (P3). A CPU instance has device id 0, as models expect."""
    source = spec.source
    return {
        "model_config": json.dumps(to_json(source.config)),
        "model_instance_kind": spec.kind.removeprefix("KIND_"),
        "model_instance_device_id": str(max(0, spec.device_id)),
        "model_instance_name": spec.name,
        "model_repository": str(source.directory.absolute()),
        "model_version": str(source.version),
        "model_name": source.name,
    }


async def _spawn(
    source: ModelSource,
    instance: str,
    limits: Limits,
    cores: frozenset[int] = frozenset(),
    board: Board | None = None,
    slots: ExecutorSlots | None = None,
) -> ChildProcess:
    try:
        words = await asyncio.to_thread(interpreter, source)
        return await ChildProcess.spawn(source.name, instance, words, limits.start_s, cores, board, slots)
    except BaseException as failure:
        if board is not None:
            board.close(died=False)
        if slots is not None:
            slots.close_descriptor()
        if isinstance(failure, InstanceDied):
            raise _load_error(failure) from None
        if isinstance(failure, OSError):
            raise InternalError(f"Stub process '{instance}' could not be started: {failure}") from failure
        raise


async def _load_call(child: ChildProcess, kind: Kind, content: Any, limits: Limits) -> Frame:
    try:
        return await child.call(kind, content, ceiling_s=limits.load_s, ceiling="charonia.max_load_s")
    except InstanceDied as death:
        raise _load_error(death) from None
    except BaseException:
        child.kill("the load was cancelled")
        raise


def _slots() -> ExecutorSlots | None:
    """Memory to share with a process; without it, columns are sent in frames."""
    try:
        return ExecutorSlots()
    except OSError as error:
        _log.warning("columns of python models travel in frames, there is no memory to share: %s", error)
        return None


def _load_error(death: InstanceDied) -> CharoniaError:
    lines = f" Its last lines:\n{death.stderr}" if death.stderr else ""
    return InternalError(f"{death}{lines}")
