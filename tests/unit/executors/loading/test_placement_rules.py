"""Whether a model is loaded on an executor: by what it asks for, and in a pool with a name by what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from charonia.errors import InvalidArgument
from executors.backends.registry import BackendRegistry
from executors.loading.placement_rules import DEFAULT_POOL, Capabilities, NotPlacedHere, PlacementRules
from executors.repository.model_directory import ModelDirectory
from executors.repository.model_repository import ModelRepository


def model(directory: Path, config: str) -> ModelDirectory:
    (directory / "m" / "1").mkdir(parents=True)
    (directory / "m" / "config.pbtxt").write_text(f'backend: "onnxruntime" {config}')
    found = ModelRepository((str(directory),)).find("m")
    assert found is not None
    return found


def placement(pool: str, *, gpus: int = 0, has_backend: bool = True, **labels: str) -> PlacementRules:
    return PlacementRules(pool, Capabilities(BackendRegistry(), gpus=gpus, configured=labels), lambda _: has_backend)


def require(text: str) -> str:
    return f'parameters {{ key: "charonia.require" value {{ string_value: "{text}" }} }}'


def test_what_is_detected_can_be_required(tmp_path: Path) -> None:
    found = model(
        tmp_path, require("device=cpu,gpus=0,!rack,backend=onnxruntime,backend=python,memory_gib>0.1,cpus>=1")
    )
    placement("any").select(found)
    with pytest.raises(NotPlacedHere, match=r"has gpus=1$"):
        placement("any", gpus=1).select(found)
    with pytest.raises(NotPlacedHere, match="'!rack'"):
        placement("any", rack="4").select(found)


def test_a_label_given_by_hand_wins(tmp_path: Path) -> None:
    found = model(tmp_path, require("device=quantum"))
    with pytest.raises(NotPlacedHere):
        placement("any").select(found)
    placement("any", device="quantum").select(found)


def test_only_a_pool_with_a_name_leaves_to_others_what_it_cannot_run(tmp_path: Path) -> None:
    found = model(tmp_path, "")
    placement(DEFAULT_POOL, has_backend=False).check(found)
    with pytest.raises(NotPlacedHere, match=r"^an executor of the pool 'cpu' has no backend 'onnxruntime'$"):
        placement("cpu", has_backend=False).check(found)


@pytest.mark.parametrize(
    ("group", "gpus", "reason"),
    [
        ("kind: KIND_GPU", 0, "has no GPU"),
        ("kind: KIND_GPU", 1, ""),
        ("gpus: [ 0, 1 ]", 1, "has no GPU 1"),
        ("gpus: [ 0, 1 ]", 2, ""),
        ("kind: KIND_CPU", 0, ""),
        ("count: 2", 0, ""),
    ],
)
def test_groups_for_devices_that_are_not_there(group: str, gpus: int, reason: str, tmp_path: Path) -> None:
    found = model(tmp_path, f"instance_group {{ {group} }}")
    placement(DEFAULT_POOL, gpus=gpus).check(found)
    if not reason:
        placement("p", gpus=gpus).check(found)
        return
    with pytest.raises(NotPlacedHere, match=reason):
        placement("p", gpus=gpus).check(found)


def test_what_cannot_be_understood_is_no_placement(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"^'charonia.require' must be terms") as caught:
        placement("any").select(model(tmp_path, require("memory > lots of")))
    assert not isinstance(caught.value, NotPlacedHere)
