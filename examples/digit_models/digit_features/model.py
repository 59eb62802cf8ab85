"""The features of a digit: two convolutions and a linear layer, trained by ``build_digit_models.py``."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DigitFeatures(nn.Module):
    """Pixels of [rows, 1, 8, 8] from 0 to 1 to features of [rows, 64], none below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv2d(1, 16, 3, padding=1)
        self.far = nn.Conv2d(16, 32, 3, padding=1)
        self.all = nn.Linear(32 * 2 * 2, 64)

    def forward(self, pixels: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.near(pixels)), 2)
        x = torch.max_pool2d(torch.relu(self.far(x)), 2)
        return torch.relu(self.all(x.flatten(1)))
