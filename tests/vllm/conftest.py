"""One server for all tests of `make test-vllm`: a real engine over SmolLM2 in float32, on CPUs.

`CHARONIA_VLLM_WEIGHTS` is the directory that `tests/rigs/vllm_weights.py` has filled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_server import Server, start
from vllm_engine import ENGINE, ENVIRONMENT, LORAS, START_S


@pytest.fixture(scope="session")
def weights() -> Path:
    directory = Path(os.environ.get("CHARONIA_VLLM_WEIGHTS", ""))
    if not (directory / "smollm2").is_dir():
        pytest.fail("CHARONIA_VLLM_WEIGHTS must name what tests/rigs/vllm_weights.py made: run `make test-vllm`")
    return directory


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    version = models / "smol" / "1"
    version.mkdir(parents=True)
    (models / "smol" / "config.pbtxt").write_text('backend: "vllm"\n')
    # beside the file: a relative path is one of the version's directory
    (version / "weights").symlink_to(weights / "smollm2")
    engine = {**ENGINE, "model": "weights", "enable_lora": "true", "max_loras": 2, "max_lora_rank": 8}
    (version / "model.json").write_text(json.dumps(engine))
    (version / "multi_lora.json").write_text(
        json.dumps({name: str(weights / folder) for name, folder in LORAS.items()})
    )
    found = start(models, tmp_path_factory.mktemp("state"), "--allow-webhooks=false", environment=ENVIRONMENT)
    try:
        found.wait_ready(START_S)
        yield found
    finally:
        code = found.stop(90)
    assert code == 0, found.log()
