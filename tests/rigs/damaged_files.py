"""Model files with changed bytes, and what a backend makes of each, in a process of its own: it may crash there.

As a program it loads and runs one model after another: `python damaged_files.py BACKEND FILE FOLDER TENSORS`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from charonia.backend import BatchInstance, InstanceSpec, ModelSource
from charonia.errors import CharoniaError
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from executors.backends.registry import BackendRegistry
from executors.configuration.config import normalise

CONFIG = 'input { name: "x" data_type: TYPE_FP32 dims: [2, 3] } output { name: "y" data_type: TYPE_FP32 dims: [2, 2] }'
_MEMORY_BYTES = 16 << 30
"""Of addresses: a changed size must not take the memory of the machine that tests."""


def damaged(content: bytes, *, seed: int, count: int = 40) -> dict[str, bytes]:
    """Files by name: cut off at some places, and as many with twelve bytes changed as make `count`."""
    sizes = (0, 1, 7, 64, len(content) // 2, len(content) - 1)
    made = {f"cut{size}": content[:size] for size in sizes}
    chance = random.Random(seed)
    for number in range(count - len(made)):
        changed = bytearray(content)
        for _ in range(12):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        made[f"changed{number:02}"] = bytes(changed)
    return made


def written(directory: Path, files: Mapping[str, bytes], file: str, beside: Mapping[str, bytes] | None = None) -> None:
    """A model of each content, in a folder of its name; `beside` are further files of every one."""
    for name, content in files.items():
        version = directory / name / "1"
        version.mkdir(parents=True)
        for other, its in {file: content, **(beside or {})}.items():
            (version / other).write_bytes(its)


def outcomes(backend: str, file: str, directory: Path, tensors: str = CONFIG) -> dict[str, str]:
    """What became of each model of a folder: "answered", "refused: ..." or "raised ..." for another exception.

    `tensors` is what their configurations say of their one input, of FP32, and their one output.

    Raises `AssertionError` when a model ended the process that loaded it.
    """
    done = subprocess.run(
        [sys.executable, __file__, backend, file, str(directory), tensors],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        encoding="utf-8",
        errors="replace",  # libraries print what they read
        timeout=600,
        check=False,
    )
    found = [json.loads(line.removeprefix("@")) for line in done.stdout.splitlines() if line.startswith("@")]
    assert done.returncode == 0, f"after {found[-1:]}: it ended with {done.returncode}: {done.stderr[-2000:]}"
    return dict(found)


async def _run(word: str, file: str, folders: list[Path], tensors: str) -> None:
    backend = BackendRegistry().get(word)
    config = normalise(parse(f'name: "m" backend: "{word}" default_model_filename: "{file}" {tensors}'))
    for folder in folders:
        said = await _outcome(backend, ModelSource("m", 1, folder, config))
        print("@" + json.dumps([folder.name, said]), flush=True)


async def _outcome(backend: object, source: ModelSource) -> str:
    try:
        model = await backend.load(source)  # type: ignore[attr-defined]
        await model.signature()
        instance = await model.create_instance(InstanceSpec("m_0", "CPU", -1, source, ModelInterface.of(source.config)))
        assert isinstance(instance, BatchInstance)
        (given,), (output,) = source.config.input, source.config.output
        await asyncio.to_thread(instance.execute, {given.name: np.ones(given.dims, np.float32)}, [output.name])
        instance.close()
        await model.close()
    except CharoniaError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    return "answered"


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asyncio.run(_run(sys.argv[1], sys.argv[2], sorted(Path(sys.argv[3]).iterdir()), sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)
