"""What `model.json` and `multi_lora.json` may say, without vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from charonia.backend import ModelSource
from charonia.errors import CharoniaError, InvalidArgument, NotFound
from executors.backends.vllm.engine_arguments import EngineArguments, engine_arguments
from protos.model_config_pb2 import ModelConfig


def source(directory: Path, arguments: Any = None, loras: Any = None) -> ModelSource:
    version = directory / "1"
    version.mkdir(exist_ok=True)
    for name, content in (("model.json", arguments), ("multi_lora.json", loras)):
        if content is not None:
            (version / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return ModelSource("m", 1, directory, ModelConfig(name="m"))


def test_the_arguments_are_the_files(tmp_path: Path) -> None:
    found = engine_arguments(source(tmp_path, {"model": "facebook/opt-125m", "enforce_eager": True}))
    assert found == EngineArguments({"model": "facebook/opt-125m", "enforce_eager": True}, {})
    assert not found.enables_lora
    assert not found.trusts_remote_code
    assert found.devices == 1


def test_a_directory_beside_the_file_may_be_named(tmp_path: Path) -> None:
    of = source(tmp_path, {"model": "weights", "tokenizer": "none"})
    (tmp_path / "1" / "weights").mkdir()
    assert dict(engine_arguments(of).arguments) == {"model": str(tmp_path / "1" / "weights"), "tokenizer": "none"}


@pytest.mark.parametrize(("written", "on"), [(True, True), ("true", True), ("False", False), (False, False)])
def test_lora_is_a_word_or_a_truth_value(tmp_path: Path, written: object, on: bool) -> None:
    (tmp_path / "1" / "adapter").mkdir(parents=True)
    loras = {"b": "/adapters/b", "a": "adapter"}
    found = engine_arguments(source(tmp_path, {"model": "x", "enable_lora": written}, loras))
    assert found.enables_lora is on
    assert list(found.loras.items()) == (
        [("b", "/adapters/b"), ("a", str(tmp_path / "1" / "adapter"))] if on else []
    ), "in the order of the file, which numbers them"


@pytest.mark.parametrize(
    ("arguments", "loras", "kind", "text"),
    [
        (None, None, NotFound, "'model.json' containing vllm engine args must be provided in '"),
        ("{", None, InvalidArgument, "'model.json' in '"),
        ([], None, InvalidArgument, "must hold a JSON object"),
        ({"enable_lora": True}, None, NotFound, "Triton backend cannot find "),
        ({"enable_lora": True}, {"a": 1}, InvalidArgument, "adapter 'a' must have a path, got 1"),
    ],
)
def test_what_cannot_be_read_is_said(
    tmp_path: Path, arguments: Any, loras: Any, kind: type[CharoniaError], text: str
) -> None:
    with pytest.raises(kind) as caught:
        engine_arguments(source(tmp_path, arguments, loras))
    assert text in caught.value.message


def test_several_gpus_are_no_gpu_instance() -> None:
    several = EngineArguments({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {})
    assert several.devices == 4
    several.check_device("MODEL")
    with pytest.raises(InvalidArgument, match="KIND_GPU is currently for single-GPU models, please specify KIND_MODEL"):
        several.check_device("GPU")
    EngineArguments({}, {}).check_device("GPU")


def test_on_cpus_the_last_slot_for_adapters_stays_empty() -> None:
    loras = {"a": "/a", "b": "/b"}
    assert EngineArguments({"enable_lora": True}, loras).with_empty_slot().arguments["max_loras"] == 3
    assert EngineArguments({"enable_lora": True, "max_loras": 2}, loras).with_empty_slot().arguments["max_loras"] == 3
    enough = EngineArguments({"enable_lora": True, "max_loras": 4}, loras)
    assert enough.with_empty_slot() is enough
    without = EngineArguments({}, {})
    assert without.with_empty_slot() is without


def test_code_of_a_model_is_a_word_or_a_truth_value() -> None:
    assert EngineArguments({"trust_remote_code": "True"}, {}).trusts_remote_code
    assert EngineArguments({"trust_remote_code": True}, {}).trusts_remote_code
    assert not EngineArguments({"trust_remote_code": False}, {}).trusts_remote_code
