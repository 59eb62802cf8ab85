"""Models that multiply, told apart by their factor while they are loaded, reloaded and unloaded."""

from __future__ import annotations

from typing import Any

import numpy as np
from e2e_asking import infer
from e2e_models import WIDTH

ONES = np.ones((1, WIDTH), np.float32)


def factor(server: Any, model: str, kind: str = "http", version: str = "") -> float:
    """What the model multiplies by."""
    answer = infer(server, model, kind, {"model_version": version}, INPUT0=ONES).as_numpy("OUTPUT0")
    assert answer.shape == (1, WIDTH)
    assert (answer == answer[0, 0]).all()
    return float(answer[0, 0])
