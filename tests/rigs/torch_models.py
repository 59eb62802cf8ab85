"""Models for the backend pytorch in each of its forms, and what they answer in torch itself."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.export import Dim

from charonia.backend import InstanceSpec, ModelSource
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from executors.configuration.config import normalise

DENSE = 'input { name: "x" data_type: TYPE_FP32 dims: 4 } output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 3 }'
WIDTHS = (4, 4, 5, 1, 4, 4, 1)
"""Of what `Nested` takes, then gives."""
STRUCTURE = ("ARGS[0]", "INPUT__1", "INPUT__2", "KWARGS[scale]", "RESULT[y]", "OUTPUT__1", "OUTPUT__2")
CODE = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)

class Dense(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return torch.relu(self.block(x))
"""


class Dense(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


class Nested(torch.nn.Module):
    """Takes and gives what Triton's structured names are for."""

    def forward(
        self, x: torch.Tensor, extra: dict[str, torch.Tensor], *, scale: torch.Tensor
    ) -> dict[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
        return {"y": x * scale, "z": (x + extra["k"], extra["w"].sum(-1, keepdim=True))}


def nested(x: np.ndarray, k: np.ndarray, w: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, ...]:
    """The answers of `Nested`, in order."""
    return x * scale, x + k, w.sum(-1, keepdims=True)


def nested_inputs(rows: int) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(rows)
    return tuple(random.standard_normal((rows, width), np.float32) for width in WIDTHS[:4])


def nested_tensors(names: tuple[str, ...] = STRUCTURE) -> str:
    """The tensors of `Nested` in a configuration, by these names."""
    return " ".join(
        f'{"input" if index < 4 else "output"} {{ name: "{name}" data_type: TYPE_FP32 dims: {width} }}'
        for index, (name, width) in enumerate(zip(names, WIDTHS, strict=True))
    )


def dense() -> Dense:
    torch.manual_seed(7)
    return Dense().eval()


def eager(model: torch.nn.Module, *arrays: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        found: np.ndarray = model(*map(torch.tensor, arrays)).numpy()
        return found


def scripted(model: torch.nn.Module, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(model).save(str(path))


def exported(model: torch.nn.Module, path: Path, largest: int = 64) -> torch.export.ExportedProgram:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {0: Dim("rows", min=1, max=largest)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, (torch.ones(2, 4),), dynamic_shapes=(rows,))
        torch.export.save(program, path)
    return program


def nested_program() -> torch.export.ExportedProgram:
    rows = {0: Dim("rows", min=1, max=64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(
            Nested(),
            (torch.ones(2, 4), {"k": torch.ones(2, 4), "w": torch.ones(2, 5)}),
            {"scale": torch.ones(2, 1)},
            dynamic_shapes={"x": rows, "extra": {"k": rows, "w": rows}, "scale": rows},
        )


def source(
    directory: Path, text: str = f"max_batch_size: 8 {DENSE}", *, leave: bool = False, **said: str
) -> ModelSource:
    parameters = "".join(
        f'parameters {{ key: "{key.replace("__", ".")}" value {{ string_value: {json.dumps(value)} }} }}'
        for key, value in said.items()
    )
    config = normalise(parse(f'name: "m" backend: "pytorch" {text} {parameters}'))
    return ModelSource("m", 1, directory, config, native_code=leave)


def spec(of: ModelSource, kind: str = "CPU", cores: frozenset[int] = frozenset()) -> InstanceSpec:
    return InstanceSpec("m_0", kind, -1 if kind == "CPU" else 0, of, ModelInterface.of(of.config), cores)


class Writes:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.write_text, (self.path, "run")


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """`Nested` as an AOTInductor package, which takes a compiler and half a minute."""
    folder = tmp_path_factory.mktemp("package")
    options = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        # two compilations in one folder read each other's unfinished files
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "cache"))
        warnings.simplefilter("ignore")
        made = torch._inductor.aoti_compile_and_package(
            nested_program(), package_path=str(folder / "model.pt2"), inductor_configs=options
        )
    return Path(made).read_bytes()


def as_package(directory: Path, package: bytes) -> Path:
    (directory / "1").mkdir(parents=True, exist_ok=True)
    (directory / "1" / "model.pt2").write_bytes(package)
    return directory


def as_script(directory: Path) -> ModelSource:
    scripted(dense(), directory / "1" / "model.pt")
    return source(directory)


def as_program(directory: Path) -> ModelSource:
    exported(dense(), directory / "1" / "model.pt2")
    return source(directory)


def as_class(directory: Path) -> ModelSource:
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.py").write_text(CODE)
    state = {f"block.layer.{key}": value for key, value in dense().layer.state_dict().items()}
    save_file(state, directory / "1" / "model.safetensors")
    return source(directory, f'max_batch_size: 8 runtime: "model.py" {DENSE}')


Made = Callable[[Path], ModelSource]
