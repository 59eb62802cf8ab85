"""The networks of the checks, with random weights: ResNet-50's and MiniLM's layouts, small on a CPU; as TorchScript."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch import nn

from .serving import Array


class _Bottleneck(nn.Module):
    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(given, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide)),
        )
        same = stride == 1 and given == wide
        self.shortcut = nn.Identity() if same else nn.Conv2d(given, wide, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class _ResNet(nn.Module):
    def __init__(self, blocks: tuple[int, ...], width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        given = width
        for stage, count in enumerate(blocks):
            own = width << stage
            for index in range(count):
                layers.append(_Bottleneck(given, own, 2 if stage and not index else 1))
                given = 4 * own
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(given, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype).contiguous(memory_format=torch.channels_last)
        return self.head(self.layers(x).mean((2, 3))).float()


class _Encoder(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(30_522, width)
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, batch_first=True, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.words(ids)).mean(1).float()


class Network:
    """A module on its device, an input of some rows, and what a configuration says of its tensors."""

    def __init__(self, module: nn.Module, device: str, array: Array, outputs: int) -> None:
        self.device = device
        self.module = module.eval().to(device)
        if device == "cuda":
            self.module = self.module.half()
        self.array = array
        self.outputs = outputs
        kind = {"float32": "TYPE_FP32", "int64": "TYPE_INT64"}[str(array.dtype)]
        dims = list(array.shape[1:])
        self.tensors = (
            f'input {{ name: "INPUT__0" data_type: {kind} dims: {dims} }} '
            f'output {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: [{outputs}] }}'
        )

    @property
    def answer(self) -> tuple[str, tuple[int, ...], Any]:
        """Name, shape and type of the output for `array`."""
        return "OUTPUT__0", (len(self.array), self.outputs), np.float32

    def rows(self, count: int) -> Array:
        """The first rows of the input."""
        return self.array[:count]

    def script(self) -> bytes:
        """The module as TorchScript."""
        file = io.BytesIO()
        with torch.no_grad():
            example = torch.from_numpy(self.array[:2]).to(self.device)
            torch.jit.save(torch.jit.trace(self.module, example), file)
        return file.getvalue()


def resnet(device: str) -> Network:
    """ResNet-50, channels last, in FP16 on a GPU; a small one on a CPU."""
    torch.manual_seed(1)
    large = device == "cuda"
    module = _ResNet((3, 4, 6, 3), 64) if large else _ResNet((1, 1), 8)
    side, rows = (224, 32) if large else (32, 8)
    array = np.random.default_rng(1).random((rows, 3, side, side), np.float32)
    return Network(module.to(memory_format=torch.channels_last), device, array, 1000)


def encoder(device: str) -> Network:
    """MiniLM's layout: six layers of 384, over 128 tokens; two of 64 on a CPU."""
    torch.manual_seed(2)
    large = device == "cuda"
    module = _Encoder(6, 384) if large else _Encoder(2, 64)
    ids = np.random.default_rng(2).integers(0, 30_522, (32 if large else 8, 128 if large else 16))
    return Network(module, device, ids, 384 if large else 64)
