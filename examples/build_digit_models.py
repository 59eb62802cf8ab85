"""Build ``examples/models_digits``: python, torch and trees in an ensemble, trained on scikit-learn's digits.

A repository of its own, because it needs PyTorch (`charonia[torch]`), treelite (`charonia[fil]`) and scikit-learn.
Run it as ``python examples/build_digit_models.py [--output DIR]``; the training takes some seconds.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from build_models import CACHE, EXAMPLES, Artifact, BuildError, build, committed, main, nothing
from computed_files import computed
from numpy.typing import NDArray

MODELS = EXAMPLES / "models_digits"
SOURCES = EXAMPLES / "digit_models"
LIBRARIES = ("torch", "safetensors", "scikit-learn", "treelite")
EPOCHS, ROWS_AT_ONCE, TREES, SEED = 20, 64, 60, 20
HELD_OUT = 360
"""Pictures that nothing is trained on, the last of the set: other people wrote them."""


def pictures() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """scikit-learn's 1,797 digits, bright on dark, UINT8 [1797, 8, 8], and which they are, INT64 [1797]."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return np.round(found.images * (255 / 16)).astype(np.uint8), found.target.astype(np.int64)


def artifacts() -> dict[str, Artifact]:
    """Every file of the repository by its path in it."""
    network = SOURCES / "digit_features" / "model.py"
    sources = (Path(__file__).read_bytes(), network.read_bytes(), *map(_installed, LIBRARIES))
    trained = computed("digits", sources, lambda: _train(network))
    wanted = {
        "digit_pixels/1/model.py": committed(SOURCES / "digit_pixels" / "model.py"),
        "digit_pixels/1/inputs.py": committed(EXAMPLES / "inputs.py"),
        "digit_features/1/model.py": committed(network),
        "digit_features/1/model.safetensors": trained["model.safetensors"],
        "digit_trees/1/checkpoint.tl": trained["checkpoint.tl"],
        "digits/1/README": nothing(),
    }
    for config in sorted(SOURCES.glob("*/config.pbtxt")):
        wanted[f"{config.parent.name}/config.pbtxt"] = committed(config)
    return wanted


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        raise BuildError(f"{distribution} is not installed: pip install 'charonia[torch,fil]' scikit-learn") from None


def _train(network: Path) -> dict[str, bytes]:
    """Train the network with a linear layer behind it, then trees in that layer's place."""
    import torch
    import treelite
    from safetensors.torch import save
    from sklearn.ensemble import RandomForestClassifier

    images, digits = (array[:-HELD_OUT] for array in pictures())
    pixels = torch.tensor(images[:, np.newaxis] / 255, dtype=torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such small operators take longer when threads share them
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        features = module_of(network).DigitFeatures()
        _fit(torch.nn.Sequential(features, torch.nn.Linear(64, 10)), pixels, torch.tensor(digits))
    torch.set_num_threads(threads)
    with torch.inference_mode():
        seen = features.eval()(pixels).numpy()
    forest = RandomForestClassifier(TREES, random_state=SEED).fit(seen, digits)
    return {
        "model.safetensors": save(features.state_dict()),
        "checkpoint.tl": treelite.sklearn.import_model(forest).serialize_bytes(),
    }


def _fit(model: Any, pixels: Any, digits: Any) -> None:
    import torch

    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(pixels)).split(ROWS_AT_ONCE):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(pixels[rows]), digits[rows]).backward()
            optimizer.step()


def module_of(path: Path) -> Any:
    """The module that a file is, which no path leads to."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_example", path)
    if spec is None or spec.loader is None:
        raise BuildError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ensure(output: Path = MODELS) -> Path:
    """Build what is missing and return the repository's path: for tests and scripts."""
    build(output, CACHE, artifacts())
    return output


if __name__ == "__main__":
    raise SystemExit(main(wanted=artifacts, default=MODELS))
