"""`charonia check` of PyTorch models: what it refuses, a load with the real library refuses in the same words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch_models import DENSE, as_class, as_program, as_script, dense

from charonia.errors import CharoniaError
from executors.backends.registry import BackendRegistry
from executors.checking.offline_models import OfflineModels
from executors.checking.repository_check import check_repository
from executors.repository.model_repository import ModelRepository

CONFIG = f'backend: "pytorch" max_batch_size: 8 {DENSE}'
OTHER_TYPE = CONFIG.replace("TYPE_FP32", "TYPE_INT32", 1)


def put(root: Path, name: str, config: str) -> Path:
    (root / name).mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    return root / name


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    as_script(put(tmp_path, "script", CONFIG))
    as_program(put(tmp_path, "program", CONFIG))
    as_program(put(tmp_path, "completed", 'backend: "pytorch"'))
    as_program(put(tmp_path, "other_type", OTHER_TYPE))
    as_class(put(tmp_path, "class", f'{CONFIG} runtime: "model.py"'))
    as_class(put(tmp_path, "no_runtime", f'{CONFIG} default_model_filename: "model.py"'))
    as_script(put(tmp_path, "no_output", f"{CONFIG.partition(' output')[0]}"))
    as_script(
        put(tmp_path, "precision", f'{CONFIG} parameters {{ key: "charonia.autocast" value {{ string_value: "x" }} }}')
    )
    for name in ("garbage", "weights"):
        (put(tmp_path, name, CONFIG) / "1").mkdir()
    (tmp_path / "garbage/1/model.pt").write_bytes(b"none")
    torch.save(dense().state_dict(), tmp_path / "weights/1/model.pt")
    return tmp_path


async def test_it_refuses_what_a_load_refuses_in_the_same_words(repository: Path) -> None:
    report = await check_repository(repository, gpus=0)
    models = OfflineModels(ModelRepository([repository]), 0, backends=BackendRegistry())  # type: ignore[arg-type]
    refused = {}
    for name in models.directories:
        try:
            await models.load(name, None)
        except CharoniaError as error:
            refused[name] = error.message
    assert {fault.model: fault.problem for fault in report.faults} == refused
    assert sorted(refused) == ["garbage", "no_output", "no_runtime", "other_type", "precision", "weights"]
    assert {
        note.model for note in report.notes if "was read, not loaded" in note.text
    } == models.directories.keys() - refused
