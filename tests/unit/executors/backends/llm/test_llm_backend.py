"""The configuration of a language model is completed, and what contradicts it is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf

from charonia.backend import InstanceSpec, ModelSource
from charonia.errors import CharoniaError, InternalError, InvalidArgument, NotFound, Unsupported
from charonia.generation.text_tensors import ENGINE_INPUTS, ENGINE_OUTPUTS
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from executors.backends.llm import LlmBackend
from executors.backends.llm.adapters import AdapterNeeds
from executors.backends.llm.conversion import converted
from executors.backends.llm.language_model import adapter_directories, added_adapters, find_model
from executors.backends.llm.llm_backend import completed
from executors.backends.llm.llm_settings import LlmSettings
from executors.configuration.config import normalise


def config(text: str = "", **parameters: str) -> Any:
    said = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()
    )
    return parse(f'name: "m" backend: "llm" {text} {said}')


def spec(**parameters: str) -> InstanceSpec:
    done = normalise(completed(config(**parameters)))
    source = ModelSource("m", 1, Path("/none"), done)
    return InstanceSpec("m_0", "CPU", -1, source, ModelInterface.of(done))


def test_tensors_are_filled_in() -> None:
    done = completed(config())
    assert [item.name for item in done.input] == [tensor.name for tensor in ENGINE_INPUTS]
    assert [item.name for item in done.output] == [tensor.name for tensor in ENGINE_OUTPUTS]
    assert all(item.optional for item in done.input)
    assert done.model_transaction_policy.decoupled
    assert done.parameters["charonia.resumable"].string_value == "true"
    assert completed(done) == done


def test_what_is_written_stays() -> None:
    done = completed(
        config('output { name: "text_output" data_type: TYPE_STRING dims: -1 }', **{"charonia.resumable": "false"})
    )
    assert [item.name for item in done.output] == ["text_output"]
    assert done.parameters["charonia.resumable"].string_value == "false"


def test_adapters_are_named() -> None:
    assert "charonia.adapters" not in completed(config()).parameters
    done = completed(config(), {"red": "/red", "a,b": "/ab"})
    assert json.loads(done.parameters["charonia.adapters"].string_value) == ["red", "a,b"]
    written = completed(config(**{"charonia.adapters": "red"}), ["red", "blue"])
    assert written.parameters["charonia.adapters"].string_value == "red"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max_batch_size: 4", "max_batch_size must be 0"),
        ('input { name: "x" data_type: TYPE_STRING dims: 1 }', "has no input 'x', it has text_input"),
        ('input { name: "stream" data_type: TYPE_INT8 dims: 1 }', "input 'stream' of 'm' must be of type BOOL"),
        ('output { name: "text_output" data_type: TYPE_STRING dims: 2 }', "output 'text_output' of 'm' must be"),
    ],
)
def test_contradictions_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        completed(config(text))


def test_parameters() -> None:
    usual = LlmSettings.of(spec(), 2048, AdapterNeeds())
    assert (usual.decoder.blocks, usual.decoder.memory_bytes, usual.decoder.exact) == (None, 1 << 30, True)
    assert usual.decoder.adapter_slots == 0
    assert LlmSettings.of(spec(), 2048, AdapterNeeds(20)).decoder.adapter_slots == 8
    places = frozenset([(0, "q_proj")])
    fitted = LlmSettings.of(spec(), 2048, AdapterNeeds(2, places, 4)).decoder
    assert (fitted.adapter_slots, fitted.adapter_rank, fitted.adapter_places) == (2, 4, places)
    # a larger rank is refused until the parameter allows it
    assert LlmSettings.of(spec(), 2048, AdapterNeeds(2, places, 64)).decoder.adapter_rank == 16
    changed = LlmSettings.of(
        spec(
            INFERENCE_NUM_THREADS="3",
            max_num_seqs="300",
            **{
                "charonia.kv_blocks": "64",
                "charonia.kv_precision": "U8",
                "charonia.activation_precision": "f32",
                "charonia.exact": "false",
                "charonia.adapter_slots": "2",
                "charonia.adapter_rank": "32",
                "charonia.prefix_cache": "0",
            },
        ),
        2048,
        AdapterNeeds(20),
    )
    decoder = changed.decoder
    assert (decoder.threads, decoder.blocks, decoder.precision, decoder.exact) == (3, 64, "u8", False)
    assert (usual.decoder.activations, decoder.activations) == ("i8", "f32")
    assert (decoder.adapter_slots, decoder.adapter_rank) == (2, 32)
    assert (changed.scheduler.max_num_seqs, changed.scheduler.max_num_batched_tokens) == (300, 600)
    assert not changed.scheduler.prefix_cache
    with pytest.raises(InvalidArgument, match=r"'charonia.kv_precision' of 'm' must be f32, f16, u8, got 'f8'"):
        LlmSettings.of(spec(**{"charonia.kv_precision": "f8"}), 2048, AdapterNeeds())


@pytest.mark.parametrize(
    ("needs", "found"),
    [(AdapterNeeds(), "it has no adapters"), (AdapterNeeds(3), "none of its 3 adapters has weights")],
)
def test_slots_that_no_adapter_can_use_are_kept_with_a_warning(
    needs: AdapterNeeds, found: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = spec(**{"charonia.adapter_slots": "2"})
    assert LlmSettings.of(asked, 2048, needs).decoder.adapter_slots == 2
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith(f"model 'm': parameter 'charonia.adapter_slots' is 2, but {found}")
    assert "adapter_model.safetensors" in text
    assert "load the model again, or set the parameter to 0" in text
    caplog.clear()
    LlmSettings.of(asked, 2048, AdapterNeeds(1, frozenset([(0, "q_proj")]), 4))
    LlmSettings.of(spec(**{"charonia.adapter_slots": "0"}), 2048, needs)
    assert not caplog.records


def source(directory: Path, text: str = "", **parameters: str) -> ModelSource:
    (directory / "1").mkdir(exist_ok=True)
    return ModelSource("m", 1, directory, config(text, **parameters))


async def test_the_signature_names_the_adapters(tmp_path: Path) -> None:
    files = source(tmp_path)
    root = files.version_directory
    (root / "openvino_model.xml").touch()
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}
    (root / "tokenizer.json").write_text(json.dumps(tokenizer))
    (root / "tokenizer_config.json").write_text("{}")
    (root / "config.json").write_text('{"max_position_embeddings": 64, "eos_token_id": 1}')
    (root / "adapters" / "red").mkdir(parents=True)
    done = await (await LlmBackend().load(files)).signature()
    assert done.parameters["charonia.adapters"].string_value == '["red"]'


async def test_files_are_looked_for(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"model.gguf' or .*openvino_model.xml' for model 'm'"):
        find_model(source(tmp_path))
    with pytest.raises(InvalidArgument, match="outside the version directory"):
        find_model(source(tmp_path, 'default_model_filename: "../x.gguf"'))
    (tmp_path / "1" / "model.bin").touch()
    with pytest.raises(InvalidArgument, match=r"reads .gguf and .xml, not 'model.bin'"):
        find_model(source(tmp_path, 'default_model_filename: "model.bin"'))
    (tmp_path / "1" / "openvino_model.xml").touch()
    model = await LlmBackend().load(source(tmp_path))
    with pytest.raises(InvalidArgument, match=r"has no tokenizer.json"):
        await model.signature()


def test_a_file_that_cannot_be_converted_says_why(tmp_path: Path) -> None:
    place = {"charonia.conversions": str(tmp_path / "made")}
    written = source(tmp_path, **place)
    gguf = write_gguf(tmp_path / "1" / "any-name.gguf", {"tokenizer.ggml.tokens": ["a"]})
    with pytest.raises(Unsupported, match="a tokenizer of the kind 'None'"):
        find_model(written)
    values = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": ["a b"]}
    write_gguf(gguf, values)
    with pytest.raises(CharoniaError, match=r"any-name.gguf' (cannot|has to) be converted"):
        find_model(written)
    assert list((tmp_path / "made").iterdir()) == []  # nothing half made is left
    (tmp_path / "file").touch()
    with pytest.raises(InternalError, match=r"name another directory with 'charonia.conversions'"):
        find_model(source(tmp_path, **{"charonia.conversions": str(tmp_path / "file" / "made")}))


@pytest.mark.parametrize("writable", [True, False])
def test_a_file_that_may_not_be_written_is_copied_for_the_converter(
    writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library opens it for writing; repositories are often mounted read-only."""
    given: list[bool] = []

    def convert(words: list[str], **_options: Any) -> subprocess.CompletedProcess[bytes]:
        assert Path(words[-1]).read_bytes() == gguf.read_bytes()
        given.append(Path(words[-1]).is_symlink())
        (Path(words[-1]).parent / "openvino_model.xml").touch()
        return subprocess.CompletedProcess(words, 0, b"", b"")

    monkeypatch.setattr("executors.backends.llm.conversion.subprocess.run", convert)
    monkeypatch.setattr("executors.backends.llm.conversion.os.access", lambda *_: writable)
    values = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": ["a b"]}
    gguf = write_gguf(tmp_path / "model.gguf", values)
    made = converted(gguf, tmp_path / "made")
    assert given == [writable]
    assert not (made / "model.gguf").exists()
    assert gguf.exists()


def test_adapters_may_be_added_and_left_out(tmp_path: Path) -> None:
    root = source(tmp_path).version_directory
    (root / "adapters" / "one").mkdir(parents=True)
    for said, names in (('{"two": "../two"}', {"one", "two"}), ('{"one": null, "two": "x"}', {"two"}), ("{}", {"one"})):
        given = source(tmp_path, **{"charonia.adapter_changes": said.replace('"', '\\"')})
        assert set(adapter_directories(given, root)) == names
        assert added_adapters(given) == names - {"one"}
    for said, reason in (
        ('{"x": "/etc"}', "outside the model's"),
        ('{"x": 1}', "must be an object"),
        ("[", "not JSON"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            adapter_directories(source(tmp_path, **{"charonia.adapter_changes": said.replace('"', '\\"')}), root)


def test_adapters_are_found_by_name(tmp_path: Path) -> None:
    root = source(tmp_path).version_directory
    (root / "adapters" / "one").mkdir(parents=True)
    (root / "multi_lora.json").write_text('{"two": "../loras/two"}')
    found = adapter_directories(source(tmp_path), root)
    assert found == {"one": str(root / "adapters" / "one"), "two": str(tmp_path / "loras" / "two")}
    for content, reason in (
        ("[", "is not JSON"),
        ("[]", "must be an object"),
        ('{"x": "/etc"}', "outside the model's"),
    ):
        (root / "multi_lora.json").write_text(content)
        with pytest.raises(InvalidArgument, match=reason):
            adapter_directories(source(tmp_path), root)
