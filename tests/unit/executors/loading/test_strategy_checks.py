"""Which strategies of batching keep a model from loading (P22)."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from charonia.errors import InvalidArgument, Unsupported
from executors.loading.loader import check_strategy
from protos.model_config_pb2 import ModelConfig

VOLUME = """
max_batch_size: 4
parameters { key: "charonia.batch_strategy" value { string_value: "volume" } }
parameters { key: "MAX_BATCH_VOLUME_BYTES" value { string_value: "9" } }
"""


def config(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def test_what_batches_dynamically_may_have_one(tmp_path: Path) -> None:
    check_strategy(config(VOLUME + "dynamic_batching { }"), tmp_path, (1,))


@pytest.mark.parametrize(
    "text",
    [
        VOLUME,
        VOLUME.replace("max_batch_size: 4", "") + "dynamic_batching { }",
        VOLUME + "sequence_batching { }",
        'platform: "ensemble" ensemble_scheduling { }' + VOLUME.replace("max_batch_size: 4", ""),
    ],
)
def test_what_does_not_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"'charonia\.batch_strategy' needs 'dynamic_batching'"):
        check_strategy(config(text), tmp_path, (1,))


@pytest.mark.parametrize("place", ["", "1"])
def test_a_library_is_refused_by_name(place: str, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / place / "batchstrategy.so").touch()
    with pytest.raises(Unsupported) as raised:
        check_strategy(config("max_batch_size: 4 dynamic_batching { }"), tmp_path, (1,))
    assert raised.value.message == (
        "custom batching by a C++ library ('batchstrategy.so'; see 'charonia.batch_strategy') is not supported yet"
    )
