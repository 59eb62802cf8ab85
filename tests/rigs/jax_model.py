"""Functions that jax exports, for the tests of the plug-in: jax itself says what they answer."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax import export
from jax import numpy as jnp
from jax._src.xla_bridge import backends_are_initialized

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


def placed(directory: str) -> None:
    """Open the model once for each of two devices that are called GPUs here, and print where it ran."""
    import charonia_jax

    charonia_jax.GPUS = "cpu"  # the word that JAX has for the devices
    asyncio.run(_placed(Path(directory)))


async def _placed(path: Path) -> None:
    config = """
    max_batch_size: 8 input { name: "image" data_type: TYPE_FP32 dims: 4 }
    input { name: "scale" data_type: TYPE_FP32 dims: 1 } output { name: "scores" data_type: TYPE_FP32 dims: 3 }
    """
    model = ReferenceModel.of(path, config, expected=lambda _: {}, requests=[], failing={})
    given = {"image": np.ones((2, 4), np.float32), "scale": np.ones((2, 1), np.float32)}
    for device in (1, 0):
        loaded = await BackendRegistry().get("jax").load(model.source)
        instance = await loaded.create_instance(replace(model.spec(), kind="GPU", device_id=device))
        answer = instance.execute(given, ["scores"])["scores"]
        equal = np.allclose(answer, scoring(**given)["scores"], rtol=1e-6)
        where = [
            next(iter(program(*(np.zeros(shape, np.float32) for shape in shapes))[0].devices())).id
            for (_, shapes), program in loaded._programs.items()
        ]
        print(f"on {device}: programs {where}, answers {'equal' if equal else answer}")
    try:
        await loaded.create_instance(replace(model.spec(), kind="GPU", device_id=2))
    except CharoniaError as error:
        print(error.message)


def seen(directory: str) -> None:
    """Make two instances for the server's GPU 1 as in a process of its own, and print what the process sees of GPUs."""
    import charonia_jax

    charonia_jax.GPUS = "cpu"
    see = charonia_jax.see_one_device

    def see_one_device(number: int) -> None:
        see(number)
        print(f"{number}: sees {os.environ['CUDA_VISIBLE_DEVICES']}, devices known {backends_are_initialized()}")

    charonia_jax.see_one_device = see_one_device
    asyncio.run(_seen(Path(directory)))


async def _seen(path: Path) -> None:
    model = ReferenceModel.of(path, "", expected=lambda _: {}, requests=[], failing={})
    loaded = await BackendRegistry().get("jax").load(replace(model.source, isolation="process"))
    await loaded.signature()
    for _ in range(2):
        spec = replace(model.spec(), source=replace(model.source, isolation="process"), kind="GPU", device_id=1)
        instance = await loaded.create_instance(spec)
        print("on", instance._device.id)


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
