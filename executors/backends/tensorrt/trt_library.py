"""The module that reads plans, `tensorrt` or `tensorrt_rtx`, with the operator's settings, and what it logs.

NVIDIA's driver is looked for first: without one the module may end the process where it should raise an error.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from charonia.backend import ModelSource
from charonia.cuda.cuda_library import CudaError
from charonia.cuda.cuda_stream import CudaDevices
from charonia.cuda.pinned_memory import shared_pool
from charonia.errors import InternalError, InvalidArgument, Unsupported
from charonia.options.table import PINNED_POOL_BYTES

_log = logging.getLogger(__name__)

MODULES = ("tensorrt", "tensorrt_rtx")
_POLICIES = ("BLOCKING", "DEVICE_BLOCKING")
_WORDS = {"true": True, "1": True, "on": True, "yes": True, "false": False, "0": False, "off": False, "no": False}
_REMEDY = "charonia[tensorrt], or charonia[tensorrt-rtx] for plans of TensorRT for RTX"
_KEPT_MESSAGES = 3
_LEAVE = (
    ". A plan of another version is read only if it was built as version compatible, and the operator trusts the code "
    "in it: --allow-native-models with the model's repository, or --backend-config=tensorrt,version-compatible=true"
)


class TrtLibrary:
    """The module, NVIDIA's driver, and a runtime for each GPU. One per process; safe to use from several threads.

    `settings` are those of `--backend-config=tensorrt,...`: only the operator writes them, never a model.
    """

    def __init__(self, settings: Mapping[str, str], model: str) -> None:
        """Raises `Unsupported` without a driver or the module, `InvalidArgument` for a setting that makes no sense."""
        self.device_blocking = _word(settings, "execution-policy", _POLICIES, "DEVICE_BLOCKING") == "DEVICE_BLOCKING"
        pinned_bytes = _size(settings, "pinned-memory-pool-byte-size", PINNED_POOL_BYTES)
        self._host_code = _flag(settings, "version-compatible")
        _flag(settings, "coalesce-request-input")  # batches are contiguous always
        try:
            self.devices = CudaDevices.shared()
        except CudaError as error:
            raise Unsupported(
                f"model '{model}' needs the tensorrt backend, which runs on NVIDIA GPUs, and this machine has none "
                f"that its driver can use ({error}): serve it where there is one"
            ) from None
        self.pinned = shared_pool(self.devices, pinned_bytes)
        self.trt = _imported(_word(settings, "library", MODULES, ""), model)
        self._logger, self._messages = _logger(self.trt)
        self._runtimes: dict[tuple[int, bool], Any] = {}
        """By the GPU, and whether plans may bring code."""
        self._lock = threading.Lock()
        self._load_plugins(settings.get("plugins", ""))

    def engine(self, path: Path, device_id: int, source: ModelSource) -> Any:
        """Read a plan. The context of the device is current. Raises `InternalError` with the library's message."""
        host_code = self._host_code or source.native_code
        with self._lock:  # making engines is not safe for threads
            runtime = self._runtimes.get((device_id, host_code))
            if runtime is None:
                runtime = self.trt.Runtime(self._logger)
                if host_code:
                    runtime.engine_host_code_allowed = True
                self._runtimes[device_id, host_code] = runtime
            self._messages.clear()
            engine = runtime.deserialize_cuda_engine(path.read_bytes())
            if engine is None:
                hint = "" if host_code else _LEAVE
                raise InternalError(
                    f"unable to create TensorRT engine for model '{source.name}': {self.messages()}{hint}"
                )
        return engine

    def messages(self) -> str:
        """The last errors that the library logged."""
        return "; ".join(self._messages) or f"{self.trt.__name__} {self.trt.__version__} gives no reason"

    def _load_plugins(self, paths: str) -> None:
        names = [path.strip() for path in paths.split(";") if path.strip()]
        if not names:
            return
        self.trt.init_libnvinfer_plugins(self._logger, "")
        for path in names:
            if self.trt.get_plugin_registry().load_library(path) is None:
                raise InvalidArgument(f"TensorRT plugin library '{path}' could not be loaded: {self.messages()}")


def needed_modules() -> tuple[tuple[str, str], ...]:
    """The module that is missing, with what to install for it; nothing where one of `MODULES` is there."""
    if any(importlib.util.find_spec(name) is not None for name in MODULES):
        return ()
    return ((MODULES[0], _REMEDY),)


def model_file(source: ModelSource, capability: str) -> str:
    """The file name for a GPU of this compute capability; "" for the default (C12)."""
    return source.config.cc_model_filenames.get(capability, "")


def _imported(wanted: str, model: str) -> Any:
    for name in (wanted,) if wanted else MODULES:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            return importlib.import_module(name)
        except (ImportError, OSError) as error:
            raise Unsupported(f"model '{model}' needs the module {name}, which cannot be imported: {error}") from None
    raise Unsupported(f"model '{model}' needs the tensorrt backend, whose library is not installed: install {_REMEDY}")


def _logger(trt: Any) -> tuple[Any, list[str]]:
    """A logger of the library that writes into ours, and the last errors it had."""
    messages: list[str] = []
    levels = {
        trt.ILogger.INTERNAL_ERROR: logging.ERROR,
        trt.ILogger.ERROR: logging.ERROR,
        trt.ILogger.WARNING: logging.WARNING,
        trt.ILogger.INFO: logging.DEBUG,
    }

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            level = levels.get(severity, logging.DEBUG)
            if level == logging.ERROR:
                messages.append(message.strip())
                del messages[:-_KEPT_MESSAGES]
            _log.log(level, "%s", message)

    return Logger(), messages


def _word(settings: Mapping[str, str], key: str, known: tuple[str, ...], default: str) -> str:
    said = settings.get(key, "") or default
    if said and said not in known:
        raise InvalidArgument(f"--backend-config=tensorrt,{key} must be one of {', '.join(known)}, got '{said}'")
    return said


def _size(settings: Mapping[str, str], key: str, default: int) -> int:
    said = settings.get(key, "") or str(default)
    if not (said.isascii() and said.isdecimal()):
        raise InvalidArgument(f"--backend-config=tensorrt,{key} must be a number of bytes, got '{said}'")
    return int(said)


def _flag(settings: Mapping[str, str], key: str) -> bool:
    said = settings.get(key, "").lower()
    if said and said not in _WORDS:
        raise InvalidArgument(f"--backend-config=tensorrt,{key} must be true or false, got '{said}'")
    return _WORDS.get(said, False)
