"""Adapters are read with their scale, and what does not fit is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_files import write_weights

from charonia.errors import InvalidArgument
from executors.backends.llm.adapter_sites import Site
from executors.backends.llm.adapters import AdapterNeeds, adapter_needs, read_adapter

SITES = (Site(0, "q_proj", 4, 6), Site(1, "down_proj", 8, 4))
Q = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = np.arange(8.0).reshape(2, 4), np.arange(12.0).reshape(6, 2)
WEIGHTS = {f"{Q}.lora_A.weight": A, f"{Q}.lora_B.weight": B}


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_weights_come_with_their_scale(tmp_path: Path, dtype: str) -> None:
    directory = write_weights(tmp_path / "one", WEIGHTS, dtype, lora_alpha=8, r=2)
    (found,) = read_adapter(str(directory), SITES, 4).values()
    np.testing.assert_array_equal(found.a, A)
    np.testing.assert_array_equal(found.b, 4 * B)


def test_rank_stabilised_scale(tmp_path: Path) -> None:
    directory = write_weights(tmp_path / "one", WEIGHTS, lora_alpha=8, r=2, use_rslora=True)
    np.testing.assert_allclose(read_adapter(str(directory), SITES, 4)[SITES[0]].b, 8 / np.sqrt(2) * B, rtol=1e-6)


@pytest.mark.parametrize(
    ("weights", "settings", "reason"),
    [
        ({}, {}, "has no weights"),
        ({"base_model.model.lm_head.lora_A.weight": A}, {}, "no place for its tensor 'base_model.model.lm_head"),
        ({f"{Q}.lora_A.weight".replace(".0.", ".7."): A}, {}, "no place for its tensor"),
        ({f"{Q}.lora_A.weight": A}, {}, "layer 0, q_proj: lora_A or lora_B is missing"),
        ({**WEIGHTS, f"{Q}.lora_B.weight": B.T}, {}, r"lora_A is \[2, 4\] and lora_B \[2, 6\], the model needs"),
        ({f"{Q}.lora_A.weight": np.ones((9, 4)), f"{Q}.lora_B.weight": np.ones((6, 9))}, {}, "rank is 9, slots hold 4"),
        (WEIGHTS, {"peft_type": "IA3"}, "is not that of a LoRA adapter"),
        (WEIGHTS, {"use_dora": True}, "'use_dora' in adapter_config.json is not supported"),
        (WEIGHTS, {"bias": "all"}, "'bias' in adapter_config.json must be"),
        (WEIGHTS, {"lora_alpha": "much"}, "'lora_alpha' in adapter_config.json must be a number above 0"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, weights: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        read_adapter(str(write_weights(tmp_path / "one", weights, **settings)), SITES, 4)


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\x02" + bytes(7) + b"{]", (1 << 50).to_bytes(8, "little")])
def test_broken_weights_are_refused(tmp_path: Path, content: bytes) -> None:
    directory = write_weights(tmp_path / "one", WEIGHTS)
    (directory / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(InvalidArgument, match=r"adapter_model\.safetensors is malformed"):
        read_adapter(str(directory), SITES, 4)


def test_a_matrix_stays_in_its_file(tmp_path: Path) -> None:
    directory = write_weights(tmp_path / "one", WEIGHTS)
    path = directory / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(InvalidArgument, match="outside the file"):
        read_adapter(str(directory), SITES, 4)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot read adapter_config.json"):
        read_adapter(str(tmp_path), SITES, 4)


def test_what_adapters_need_is_read_from_their_tables(tmp_path: Path) -> None:
    one = write_weights(tmp_path / "one", WEIGHTS)
    down = "base_model.model.model.layers.1.mlp.down_proj"
    two = write_weights(
        tmp_path / "two", {f"{down}.lora_A.weight": np.ones((3, 8)), f"{down}.lora_B.weight": np.ones((4, 3))}
    )
    broken = write_weights(tmp_path / "broken", WEIGHTS)
    (broken / "adapter_model.safetensors").write_bytes(b"\xff" * 16)
    needs = adapter_needs([str(one), str(two), str(broken), str(tmp_path / "missing")])
    assert needs == AdapterNeeds(4, frozenset([(0, "q_proj"), (1, "down_proj")]), 3)
    assert adapter_needs([]) == AdapterNeeds()
