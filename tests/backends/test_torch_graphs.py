"""CUDA graphs of the pytorch backend, over a `torch.cuda` that records operators on the CPU: no GPU has run them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded_cuda import RecordedCuda
from torch_models import CODE, DENSE, as_class, as_program, as_script, dense, eager, scripted, source, spec

from charonia.backend import InstanceSpec
from charonia.errors import CharoniaError, InternalError
from executors.backends.pytorch import torch_model
from executors.backends.pytorch.torch_instance import TorchInstance
from executors.backends.pytorch.torch_model import TorchModel

GRAPHS = "optimization { cuda { graphs: true } }"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedCuda:
    world = RecordedCuda()
    monkeypatch.setattr(torch_model, "library", lambda: world)
    monkeypatch.setattr(torch_model, "_device", lambda torch_module, spec: torch.device("cpu"))
    return world


def on_gpu(directory: Path, more: str = GRAPHS, tensors: str = DENSE, **said: str) -> InstanceSpec:
    return spec(source(directory, f"max_batch_size: 8 {tensors} {more}", **said), "GPU")


def instance_of(of: InstanceSpec) -> TorchInstance:
    return asyncio.run(TorchModel(of.source).create_instance(of))


def rows(count: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(count).standard_normal((count, 4), np.float32)}


@pytest.mark.parametrize("made", [as_script, as_program, as_class], ids=lambda made: made.__name__[3:])
def test_batches_with_a_graph_are_replayed_and_answer_as_eager_does(
    made: Any, recorded: RecordedCuda, tmp_path: Path
) -> None:
    of = made(tmp_path)
    of.config.optimization.cuda.graphs = True
    instance = instance_of(spec(of, "GPU"))
    assert not recorded.graphs, "they are recorded in the thread that runs them"
    instance.started()
    assert len(recorded.graphs) == len([1, 2, 3, 4, 6, 8])
    for count in (1, 5, 8, 2, 1, 7):
        given = rows(count)
        found = instance.execute(given, ["OUTPUT__0"])["OUTPUT__0"]
        np.testing.assert_allclose(found, eager(dense(), given["x"]), rtol=1e-5, atol=1e-6)
    assert sum(graph.replays for graph in recorded.graphs) == 4, "there is none for 5 and 7 rows"
    instance.close()


def test_an_answer_stays_as_it_is_when_its_graph_is_replayed(recorded: RecordedCuda, tmp_path: Path) -> None:
    instance = instance_of(spec(_with_graphs(as_class(tmp_path)), "GPU"))
    instance.started()
    first, second = rows(2), {"x": np.ones((2, 4), np.float32)}
    kept = instance.execute(first, ["OUTPUT__0"])["OUTPUT__0"]
    before = kept.copy()
    instance.execute(second, ["OUTPUT__0"])
    np.testing.assert_array_equal(kept, before)


def _with_graphs(of: Any, text: str = "") -> Any:
    of.config.optimization.cuda.graphs = True
    for rows_of_graph, least in [tuple(map(int, word.split("-"))) for word in text.split()]:
        added = of.config.optimization.cuda.graph_spec.add()
        added.batch_size, added.graph_lower_bound.batch_size = rows_of_graph, least
    return of


def test_smaller_batches_are_padded_where_a_lower_bound_says_so(recorded: RecordedCuda, tmp_path: Path) -> None:
    instance = instance_of(spec(_with_graphs(as_class(tmp_path), "4-2 8-6"), "GPU"))
    instance.started()
    replays = []
    for count in (3, 2, 8, 7, 5, 1):
        given = rows(count)
        found = instance.execute(given, ["OUTPUT__0"])["OUTPUT__0"]
        assert found.shape == (count, 3)
        np.testing.assert_allclose(found, eager(dense(), given["x"]), rtol=1e-5, atol=1e-6)
        replays.append(sum(graph.replays for graph in recorded.graphs))
    assert replays == [1, 2, 3, 4, 4, 4]


def test_channels_last_and_autocast_are_recorded_too(recorded: RecordedCuda, tmp_path: Path) -> None:
    class Images(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).mean((2, 3))

    torch.manual_seed(1)
    model = Images().eval()
    scripted(model, tmp_path / "1" / "model.pt")
    tensors = DENSE.replace("dims: 4", "dims: [3, 8, 8]").replace("dims: 3 ", "dims: 4 ")
    of = on_gpu(tmp_path, tensors=tensors, charonia__channels_last="1", charonia__autocast="bf16")
    instance = instance_of(of)
    instance.started()
    images = np.random.default_rng(4).standard_normal((2, 3, 8, 8), np.float32)
    found = instance.execute({"x": images}, ["OUTPUT__0"])["OUTPUT__0"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, eager(model, images), atol=3e-2)
    assert sum(graph.replays for graph in recorded.graphs) == 1


def test_a_program_that_reads_values_is_refused_when_it_is_loaded(recorded: RecordedCuda, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    code = CODE.replace("return torch.relu(self.block(x))", "return self.block(x) if float(x.sum()) >= 0 else x[:, :3]")
    (tmp_path / "1" / "model.py").write_text(code)
    torch.save({"block.layer.weight": torch.ones(3, 4), "block.layer.bias": torch.ones(3)}, tmp_path / "1" / "model.pt")
    instance = instance_of(on_gpu(tmp_path, f'runtime: "model.py" {GRAPHS}'))
    with pytest.raises(InternalError) as caught:
        instance.started()
    assert str(caught.value) == (
        "model 'm': its run for 'x' [8,4] cannot be recorded as a CUDA graph (CUDA error: operation not permitted when "
        "stream is capturing); leave optimization.cuda.graphs out"
    )


def test_the_first_runs_which_set_things_up_are_not_recorded(recorded: RecordedCuda, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    counted = CODE.replace(
        "        return torch.relu(self.block(x))",
        """        self.runs = {**getattr(self, "runs", {}), len(x): getattr(self, "runs", {}).get(len(x), 0) + 1}
        return torch.relu(self.block(x)) + (0 * float(x.sum()) if self.runs[len(x)] <= 2 else 0)""",
    )
    (tmp_path / "1" / "model.py").write_text(counted)
    state = {f"block.{name}": value for name, value in dense().state_dict().items()}
    torch.save(state, tmp_path / "1" / "model.pt")
    instance = instance_of(on_gpu(tmp_path, f'runtime: "model.py" {GRAPHS}'))
    instance.started()
    found = instance.execute(rows(3), ["OUTPUT__0"])["OUTPUT__0"]
    np.testing.assert_allclose(found, eager(dense(), rows(3)["x"]), rtol=1e-5, atol=1e-6)


def test_instances_record_one_after_another_and_have_graphs_of_their_own(
    recorded: RecordedCuda, tmp_path: Path
) -> None:
    of = spec(_with_graphs(as_class(tmp_path)), "GPU")

    async def two() -> list[TorchInstance]:
        model = TorchModel(of.source)
        return list(await asyncio.gather(model.create_instance(of), model.create_instance(of)))

    instances = asyncio.run(two())
    failed: list[BaseException] = []

    def start(instance: TorchInstance) -> None:
        try:
            instance.started()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=start, args=(instance,)) for instance in instances]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(recorded.graphs) == 12
    for count, instance in zip((1, 4), instances, strict=True):
        found = instance.execute(rows(count), ["OUTPUT__0"])["OUTPUT__0"]
        np.testing.assert_allclose(found, eager(dense(), rows(count)["x"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["CPU", "GPU"])
def test_without_graphs_nothing_is_recorded(kind: str, recorded: RecordedCuda, tmp_path: Path) -> None:
    instance = instance_of(spec(as_class(tmp_path), kind))
    instance.started()
    instance.execute(rows(2), ["OUTPUT__0"])
    assert not recorded.graphs
    with pytest.raises(CharoniaError):
        instance.execute({"x": np.zeros((2, 5), np.float32)}, ["OUTPUT__0"])
