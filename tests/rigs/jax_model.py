"""Functions that jax exports, for the tests of the plug-in: jax itself says what they answer."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax import export
from jax import numpy as jnp

from charonia.errors import CharoniaError
from charonia.testing.backend_contract import ReferenceModel
from executors.backends.registry import BackendRegistry

TOO_LONG_S = 20

WEIGHTS = np.random.default_rng(5).normal(size=(4, 3)).astype(np.float32)


def scoring(image: Any, *, scale: Any) -> dict[str, Any]:
    """[rows, 4] and [rows, 1] to scores [rows, 3] and their best [rows]."""
    scores = jax.nn.softmax(jnp.tanh(image @ WEIGHTS) * scale)
    return {"scores": scores, "best": jnp.argmax(scores, 1).astype(np.int32)}


def of(shape: tuple[Any, ...], dtype: Any = np.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def exported(function: Callable[..., Any], *given: Any, platforms: Any = ("cpu",), **named: Any) -> bytes:
    """What `jax.export` writes."""
    return bytes(export.export(jax.jit(function), platforms=platforms)(*given, **named).serialize())


def scoring_file() -> bytes:
    (rows,) = export.symbolic_shape("rows")
    return exported(scoring, image=of((rows, 4)), scale=of((rows, 1)))


def saved(directory: Path, content: bytes) -> Path:
    """A model's directory with that file."""
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.jax").write_bytes(content)
    return directory


def child(directory: str) -> None:
    """Open every model of a directory, each in a process of its own, and print what came of it."""
    BackendRegistry().get("jax")
    for path in sorted(Path(directory).iterdir()):
        sys.stdout.flush()
        pid = os.fork()  # jax is imported, but has begun nothing
        if pid == 0:
            signal.alarm(TOO_LONG_S)
            print(path.name, asyncio.run(_opened(path)), flush=True)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            print(path.name, "ended by", signal.Signals(os.WTERMSIG(status)).name)


async def _opened(path: Path) -> str:
    model = ReferenceModel.of(path, "", expected=lambda _: {}, requests=[], failing={})
    try:
        loaded = await BackendRegistry().get("jax").load(model.source)
        signature = await loaded.signature()
        instance = await loaded.create_instance(model.spec())
        instance.execute({"image": np.ones((2, 4), np.float32), "scale": np.ones((2, 1), np.float32)}, ["scores"])
    except CharoniaError as error:
        return f"refused: {error.message}"
    except KeyError:
        return f"has other names: {signature}"
    return "answered"
