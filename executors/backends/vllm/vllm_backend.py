"""The backend `vllm`: a model is a `model.json` with the arguments of vLLM's engine, as for Triton's vLLM backend.

The engine runs in a process of its own below the model's process, which is this one: AsyncLLM starts it. So a model
needs isolation "process": what starts processes cannot run in a sandbox, and starting an engine stops its process's
event loop for seconds. `vllm_instance` runs requests.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from charonia.backend import Backend, Format, InstanceSpec, Model, ModelSource
from charonia.cuda.visible_devices import see_one_device
from charonia.errors import CharoniaError, InternalError, InvalidArgument, Unsupported
from executors.backends.python.custom_metrics import CustomMetrics
from protos.model_config_pb2 import ModelConfig

from .completed_tensors import check_policy, completed
from .engine_arguments import ENGINE_FILE, EngineArguments, engine_arguments
from .vllm_instance import VllmInstance

_log = logging.getLogger(__name__)

_REPORTS = "REPORT_CUSTOM_METRICS"


class VllmBackend(Backend):
    """The backend `vllm`."""

    name = "vllm"
    api = (1, 0)
    formats = (Format(files=(ENGINE_FILE,)),)
    requires = (("vllm", "charonia[vllm]"),)
    isolation = "process"

    def __init__(self) -> None:
        self.custom_metrics = CustomMetrics()
        """The boards of its models' processes, which `executors.isolation` gives them."""

    def render_metrics(self) -> bytes:
        """Return the families of all engines in the text format."""
        return self.custom_metrics.render()

    def prefers_gpu(self) -> bool:
        """Whether instances of kind AUTO go to a GPU: vLLM's own builds need one."""
        return True

    async def load(self, source: ModelSource) -> VllmModel:
        """Return the model; its engine is started by its instance."""
        return VllmModel(source)


class VllmModel(Model):
    """One load of a model's version. Each of its instances has an engine."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    async def signature(self) -> ModelConfig:
        """Return the configuration with all that such models have, and the names of its adapters.

        Raises `InstanceError` for batching, `NotFound` or `InvalidArgument` for files that cannot be read.
        """
        return completed(self._source.config, engine_arguments(self._source).loras)

    async def create_instance(self, spec: InstanceSpec) -> VllmInstance:
        """Start an engine and wait until it is ready. Raises a `CharoniaError` with the reason."""
        source = spec.source
        check_policy(source.config)
        if source.isolation != "process":
            raise Unsupported(
                f"'charonia.isolation' of model '{source.name}' must be \"process\": vLLM starts processes of its own"
            )
        written = engine_arguments(source)
        written.check_device(spec.kind)
        if written.trusts_remote_code:
            source.check_native_code(f"'trust_remote_code' in {ENGINE_FILE}")
        _set_environment(spec)
        try:
            engine, supported = await _started(written, spec)
        except CharoniaError:
            raise
        except Exception as error:
            _log.exception("[vllm] Failed to start engine")
            raise InternalError(f"vLLM cannot start model '{source.name}': {type(error).__name__}: {error}") from error
        return VllmInstance(engine, source.name, supported, written, resumes=spec.interface.resumable)


def _set_environment(spec: InstanceSpec) -> None:
    """Settings that vLLM reads when it is imported; those of the operator stay."""
    # a forked engine would hold this process's sockets open
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if spec.kind == "GPU" and spec.device_id >= 0:
        see_one_device(spec.device_id)


async def _started(written: EngineArguments, spec: InstanceSpec) -> tuple[Any, frozenset[str]]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    if current_platform.is_cpu():
        written = written.with_empty_slot()
    try:
        arguments = AsyncEngineArgs(**written.arguments)
    except TypeError as error:  # a name that it does not have
        raise InvalidArgument(f"'{ENGINE_FILE}' of model '{spec.source.name}': {error}") from None
    reports = spec.source.flag(_REPORTS) is not False and not arguments.disable_log_stats
    # its own loggers count for a server that this process does not have
    arguments.disable_log_stats = True
    loggers = []
    if reports:
        from .engine_metrics import logger_factory

        loggers.append(logger_factory({"model": spec.source.name, "version": str(spec.source.version)}))
    engine = AsyncLLM.from_engine_args(arguments, stat_loggers=loggers)
    try:
        return engine, frozenset(await engine.get_supported_tasks())
    except BaseException:
        engine.shutdown()
        raise
