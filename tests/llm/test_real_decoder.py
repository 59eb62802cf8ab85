"""The decoder over a real model: what depends on what, and whose logits they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.errors import InvalidArgument
from executors.backends.llm.adapters import adapter_needs
from executors.backends.llm.conversion import IR
from executors.backends.llm.decoder import DecoderSettings, OpenVinoDecoder, multiplies_bytes
from executors.generation.engine import StepInput

TEXT = "The capital of France is Paris, and that of Italy is Rome. The capital of Spain is Madrid, and that of"


def run(decoder: OpenVinoDecoder, *sequences: tuple[Sequence[int], int, Sequence[int], int]) -> Any:
    """One step: (tokens, how many are in the blocks already, blocks, adapter); the logits of all tokens."""
    arrays: dict[str, list[int]] = {name: [] for name in ("tokens", "positions", "past_lengths", "blocks", "adapters")}
    begins, block_begins = [0], [0]
    for tokens, past, blocks, adapter in sequences:
        arrays["tokens"] += tokens
        arrays["positions"] += range(past, past + len(tokens))
        arrays["past_lengths"].append(past)
        arrays["blocks"] += blocks[: -(-(past + len(tokens)) // decoder.block_tokens)]
        arrays["adapters"] += [adapter] * len(tokens)
        begins.append(len(arrays["tokens"]))
        block_begins.append(len(arrays["blocks"]))
    arrays |= {"begins": begins, "block_begins": block_begins, "sampled": list(range(begins[-1]))}
    return decoder.step(StepInput(**{name: np.array(one, np.int32) for name, one in arrays.items()})).copy()


@pytest.fixture(scope="module")
def ids(model: Any) -> list[int]:
    found: list[int] = model.tokenizer.encode(TEXT * 3, special=True)
    assert len(found) > 64  # more than two blocks
    return found


def test_a_token_depends_on_those_before_it_alone(decoder: OpenVinoDecoder, ids: list[int]) -> None:
    """Not on how the prompt is cut, nor on its neighbours, nor on the blocks: bit by bit."""
    whole = run(decoder, (ids, 0, range(8), -1))
    parts = [run(decoder, (ids[at : at + 13], at, range(8, 16), -1)) for at in range(0, len(ids), 13)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    one_by_one = [run(decoder, ([token], at, range(16, 24), -1)) for at, token in enumerate(ids)]
    np.testing.assert_array_equal(np.concatenate(one_by_one), whole)
    prompt = [*ids, *range(1000, 1160 - len(ids))]  # longer than what one pass may take
    long = run(decoder, (prompt, 0, range(8), -1))
    np.testing.assert_array_equal(run(decoder, ([prompt[-1]], len(prompt) - 1, range(8), -1)), long[-1:])
    np.testing.assert_array_equal(long[: len(ids)], whole)
    others = [(ids[at : at + 40], 0, range(100 + 4 * at, 104 + 4 * at), -1) for at in range(16)]
    among = run(decoder, *others, (ids, 0, range(24, 32), -1))
    np.testing.assert_array_equal(among[-len(ids) :], whole)


def test_three_adapters_in_a_step_equal_each_alone(decoder: OpenVinoDecoder, model: Any, ids: list[int]) -> None:
    for slot, directory in enumerate(model.adapters.values()):
        decoder.load_adapter(slot, directory)
    alone = [run(decoder, (ids[:40], 0, range(8), slot)) for slot in (-1, 0, 1, 2)]
    mixed = run(decoder, *((ids[:40], 0, range(8 * at, 8 * at + 8), slot) for at, slot in enumerate((-1, 0, 1, 2))))
    np.testing.assert_array_equal(mixed, np.concatenate(alone))
    assert all(np.abs(alone[0] - one).max() > 1 for one in alone[1:])


def test_places_without_adapters_cost_nothing_and_change_nothing(
    decoder: OpenVinoDecoder, model: Any, ids: list[int], tmp_path: Any
) -> None:
    """A decoder that was made for adapters of two products: their logits are those of one that has all places."""
    from lora_files import write_adapter

    modules = ("self_attn.q_proj", "self_attn.v_proj")
    directory = str(write_adapter(tmp_path / "adapter", 5, modules=modules, rank=4))
    needs = adapter_needs([directory])
    assert (len(needs.places), needs.rank) == (60, 4)
    settings = DecoderSettings(
        threads=2, context=2048, blocks=16, adapter_slots=2, adapter_rank=needs.rank, adapter_places=needs.places
    )
    narrow = OpenVinoDecoder(str(model.directory / IR), settings)
    try:
        narrow.load_adapter(1, directory)
        decoder.load_adapter(2, directory)
        with pytest.raises(InvalidArgument, match="was loaded when none of its adapters had one there"):
            narrow.load_adapter(0, model.adapters["one"])
        for ours, theirs in ((1, 2), (-1, -1)):
            np.testing.assert_array_equal(
                run(narrow, (ids[:40], 0, range(8), ours)), run(decoder, (ids[:40], 0, range(8), theirs))
            )
    finally:
        narrow.close()


def test_a_slot_holds_what_was_loaded_last(decoder: OpenVinoDecoder, model: Any, ids: list[int]) -> None:
    one, two = model.adapters["one"], model.adapters["two"]
    decoder.load_adapter(0, one)
    before = run(decoder, (ids[:8], 0, range(8), 0))
    decoder.load_adapter(0, two)
    assert not np.array_equal(run(decoder, (ids[:8], 0, range(8), 0)), before)
    decoder.load_adapter(0, one)
    np.testing.assert_array_equal(run(decoder, (ids[:8], 0, range(8), 0)), before)
    with pytest.raises(InvalidArgument, match="there is no adapter slot 3, but 3"):
        decoder.load_adapter(3, one)


@pytest.mark.parametrize("module", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
def test_an_adapter_is_what_it_adds_to_the_weights(
    decoder: OpenVinoDecoder, model: Any, ids: list[int], module: str, tmp_path: Any
) -> None:
    """Against a forward pass of the whole model in NumPy, whose weights come from the GGUF file."""
    import numpy_llama
    from lora_files import SHAPES, write_adapter

    (path,) = (name for name in SHAPES if name.endswith(module))
    directory = write_adapter(tmp_path / "adapter", 7, modules=(path,), deviation=0.1)
    decoder.load_adapter(1, str(directory))
    reference = numpy_llama.Llama(model.repository / "smollm2" / "1" / "model.gguf")
    plain = reference.logits(ids[:12])
    changed = reference.logits(ids[:12], numpy_llama.adapter_deltas(directory))
    ours = run(decoder, (ids[:12], 0, range(8), 1))
    # activations are rounded to eight bits in the decoder; the adapter's effect is much larger than that
    assert _distance(ours, changed) < 0.15
    assert _distance(plain, changed) > 3 * _distance(ours, changed)
    assert _distance(run(decoder, (ids[:12], 0, range(8), -1)), plain) < 0.1


def _distance(one: Any, other: Any) -> float:
    return float(np.abs(one - other).mean() / other.std())


def test_activations_of_32_bits_are_nearer_to_the_files_weights(model: Any, decoder: OpenVinoDecoder) -> None:
    """A chat whose two first tokens are nearly equal: eight-bit activations choose the other one."""
    import numpy_llama

    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    chat = "".join(
        f"<|im_start|>{role}\n{content}<|im_end|>\n"
        for role, content in (("system", system), ("user", "What is the capital of France?"))
    )
    asked = model.tokenizer.encode(chat + "<|im_start|>assistant\n", special=True)
    reference = numpy_llama.Llama(model.repository / "smollm2" / "1" / "model.gguf").logits(asked)
    settings = DecoderSettings(threads=2, context=2048, blocks=16, activations="f32")
    other = OpenVinoDecoder(str(model.directory / IR), settings)
    try:
        exact = run(other, (asked, 0, range(8), -1))
        one_by_one = [run(other, ([token], at, range(8, 16), -1)) for at, token in enumerate(asked)]
    finally:
        other.close()
    np.testing.assert_array_equal(np.concatenate(one_by_one), exact)
    assert exact[-1].argmax() == reference[-1].argmax()
    usual = run(decoder, (asked, 0, range(8), -1))
    if multiplies_bytes(Path("/proc/cpuinfo").read_text()):
        assert _distance(exact, reference) < 0.7 * _distance(usual, reference)
    else:  # such a processor computes in float32 anyway
        np.testing.assert_array_equal(usual, exact)


def test_half_precision_keys_and_fast_prompts_are_near(model: Any, decoder: OpenVinoDecoder, ids: list[int]) -> None:
    """What is not exact gives nearly the same logits."""
    exact = run(decoder, (ids, 0, range(8), -1))
    for changes in ({"precision": "u8"}, {"precision": "f16"}, {"exact": False}):
        settings = DecoderSettings(threads=2, context=2048, blocks=16, **changes)  # type: ignore[arg-type]
        other = OpenVinoDecoder(str(model.directory / IR), settings)
        try:
            near = run(other, (ids, 0, range(8), -1))
            assert np.corrcoef(near.ravel(), exact.ravel())[0, 1] > 0.9
        finally:
            other.close()


def test_too_little_memory_is_said(model: Any) -> None:
    with pytest.raises(InvalidArgument, match="room for 0 blocks of 32 tokens"):
        OpenVinoDecoder(str(model.directory / IR), DecoderSettings(threads=1, context=64, memory_bytes=1 << 20))


def test_warming_up_touches_no_block_of_a_request(decoder: OpenVinoDecoder, ids: list[int]) -> None:
    whole = run(decoder, (ids[:40], 0, range(8), -1))
    run(decoder, (ids[:20], 0, range(8, 16), -1))
    decoder.warm_up()
    np.testing.assert_array_equal(run(decoder, (ids[20:40], 20, range(8, 16), -1)), whole[20:])
