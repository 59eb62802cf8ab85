"""The real model of these tests: the example's, converted once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from lora_files import write_adapter

from charonia.generation.text_assets import assets_of_files
from charonia.generation.tokenizer import Tokenizer
from executors.backends.llm.conversion import IR, converted
from executors.backends.llm.decoder import DecoderSettings, OpenVinoDecoder

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class RealModel:
    """Where the converted model is, its tokenizer, and adapters by name."""

    directory: Path
    repository: Path
    tokenizer: Tokenizer
    adapters: dict[str, str]


@pytest.fixture(scope="session")
def conversions() -> Path:
    return EXAMPLES / ".cache" / "conversions"


@pytest.fixture(scope="session")
def model(conversions: Path, tmp_path_factory: pytest.TempPathFactory) -> RealModel:
    sys.path.insert(0, str(EXAMPLES))
    import build_llm_model
    import build_models

    build_models.build(build_llm_model.MODELS, wanted=build_llm_model.artifacts())
    made = converted(build_llm_model.MODELS / "smollm2" / "1" / "model.gguf", conversions)
    names = ("tokenizer.json", "tokenizer_config.json", "config.json")
    assets = assets_of_files({name: (made / name).read_bytes() for name in names})
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {name: str(write_adapter(folder / name, seed)) for seed, name in enumerate(("one", "two", "three"))}
    return RealModel(made, build_llm_model.MODELS, Tokenizer.from_bytes(assets.tokenizer_json, assets), adapters)


@pytest.fixture(scope="session")
def decoder(model: RealModel) -> Iterator[OpenVinoDecoder]:
    settings = DecoderSettings(threads=2, context=2048, blocks=256, adapter_slots=3, adapter_rank=8)
    made = OpenVinoDecoder(str(model.directory / IR), settings)
    yield made
    made.close()
