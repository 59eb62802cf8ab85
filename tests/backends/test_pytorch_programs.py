"""Exported programs that would run code of their author's when they are loaded, and honest ones."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from backend_calls import instance_of, signature_of
from torch.export import Dim
from torch_models import Writes, dense, exported, source, spec

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument
from executors.backends.pytorch import PyTorchBackend
from executors.backends.pytorch.program_check import find_fault
from executors.configuration.autofill import from_graph
from executors.configuration.config import normalise


def rewritten(original: Path, edit: Callable[[str, bytes], bytes]) -> None:
    """Change the files of an archive in place."""
    with zipfile.ZipFile(original) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(original, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, edit(name.partition("/")[2], content))


def in_program(change: Callable[[dict], None]) -> Callable[[str, bytes, str], bytes]:
    def edit(name: str, content: bytes, code: str) -> bytes:
        if name != "models/model.json":
            return content
        text = json.loads(content)
        change(text)
        return json.dumps(text).replace("CODE", json.dumps(code)[1:-1]).encode()

    return edit


def a_pickle(name: str, content: bytes, code: str) -> bytes:
    if name != "data/sample_inputs/model.pt":
        return content
    held = io.BytesIO()
    torch.save((Writes(Path(code.split('"')[3])),), held)
    return held.getvalue()


def a_pickled_weight(name: str, content: bytes, code: str) -> bytes:
    if name == "data/weights/weight_0":
        return a_pickle("data/sample_inputs/model.pt", content, code)
    return content.replace(b'"use_pickle": false', b'"use_pickle": true') if name.endswith("s_config.json") else content


def _size(text: dict) -> None:
    text["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0]["as_expr"]["expr_str"] = "CODE"


def _guard(text: dict) -> None:
    text["guards_code"] = ["CODE > 0"]


def _target(text: dict) -> None:
    node = text["graph_module"]["graph"]["nodes"][0]
    node["target"] = "torch.hub.load_state_dict_from_url"


def _name(text: dict) -> None:
    text["graph_module"]["graph"]["nodes"][0]["name"] = "a = CODE; b"


def _key(text: dict) -> None:
    call = text["graph_module"]["module_call_graph"][0]["signature"]
    leaf = {"type": None, "context": None, "children_spec": []}
    call["out_spec"] = json.dumps(
        [1, {"type": "builtins.dict", "context": json.dumps(["y'); quit('"]), "children_spec": [leaf]}]
    )


HOSTILE = {
    "pickle": (a_pickle, "'data/sample_inputs/model.pt' holds more than tensors"),
    "weight": (a_pickled_weight, "names a pickled or custom object, 'weight_0'"),
    "size": (in_program(_size), "the size '.*' could be code"),
    "guard": (in_program(_guard), "the guard '.*' could be code"),
    "target": (in_program(_target), "the operator 'torch.hub.load_state_dict_from_url' is none that is allowed"),
    "name": (in_program(_name), "the name 'a = .*' could be code"),
    "key": (in_program(_key), "the key in .* could be code"),
}


@pytest.mark.parametrize("kind", list(HOSTILE))
async def test_a_hostile_program_is_refused_and_nothing_of_it_runs(kind: str, tmp_path: Path) -> None:
    exported(dense(), tmp_path / "1" / "model.pt2")
    edit, text = HOSTILE[kind]
    code = f'__import__("pathlib").Path("{tmp_path}/written").write_text("run")'
    rewritten(tmp_path / "1" / "model.pt2", lambda name, content: edit(name, content, code))
    with pytest.raises(InvalidArgument, match=f"'model.pt2' is not loaded, as .*(?:{text})"):
        await instance_of(PyTorchBackend(), spec(source(tmp_path)))
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("kind", ["pickle", "weight", "size", "guard"])
def test_without_the_check_it_would_have_run(kind: str, tmp_path: Path) -> None:
    """What the check is for: `torch.export.load` itself writes the file. Once it does not, the rule may go."""
    exported(dense(), tmp_path / "model.pt2")
    edit, _ = HOSTILE[kind]
    code = f'__import__("pathlib").Path("{tmp_path}/written").write_text("run")'
    rewritten(tmp_path / "model.pt2", lambda name, content: edit(name, content, code))
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.load(tmp_path / "model.pt2").module()(torch.ones(2, 4))
    assert (tmp_path / "written").read_text() == "run"


def test_an_archive_that_is_damaged_or_of_an_older_form(tmp_path: Path) -> None:
    """An older, unsafe reader is used for a file named `version` outside of the folder."""
    path = tmp_path / "model.pt2"
    exported(dense(), path)
    assert find_fault(path, torch) is None
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("version", "8.1")
    assert "damaged" in str(find_fault(path, torch))
    exported(dense(), path)
    path.write_bytes(path.read_bytes()[:-100])
    assert "damaged" in str(find_fault(path, torch))


class Everything(torch.nn.Module):
    """Control flow, symbolic sizes, text arguments and constants: what honest programs consist of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.arange(4.0))
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        attended, _ = self.attention(x, x, x)
        mixed = torch.einsum("bij,bkj->bik", attended, x + self.steps)
        chosen = torch.cond(mask.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (mixed,))
        rows, length = x.shape[0], x.shape[1]
        return {
            "all": chosen.reshape(rows, -1),
            "half": x[:, : length // 2 + 1].mean(1),
            "two": x.new_full((rows, 2), 2.0),
        }


async def test_honest_programs_pass(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    torch.manual_seed(1)
    model = Everything().eval()
    rows, length = Dim("rows", min=1, max=64), 2 * Dim("half", min=1, max=16)
    x, mask = torch.randn(3, 6, 4), torch.ones(3, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, (x, mask), dynamic_shapes={"x": {0: rows, 1: length}, "mask": {0: rows}})
        torch.export.save(program, tmp_path / "1" / "model.pt2")
    of = source(tmp_path, "max_batch_size: 8")
    completed = from_graph(of.config, await signature_of(PyTorchBackend(), of))
    of = ModelSource("m", 1, tmp_path, normalise(completed))
    instance = await instance_of(PyTorchBackend(), spec(of))
    names = [f"OUTPUT__{index}" for index in range(3)]
    found = instance.execute({"INPUT__0": x.numpy(), "INPUT__1": mask.numpy()}, names)
    with torch.inference_mode():
        for name, wanted in zip(names, model(x, mask).values(), strict=True):
            np.testing.assert_allclose(found[name], wanted.numpy(), rtol=1e-5, atol=1e-6)
