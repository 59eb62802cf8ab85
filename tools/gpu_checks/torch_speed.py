"""Speed of torch models: bare against served, CUDA graphs, dynamic batching, and AOTInductor packages."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from charonia.client import Client
from charonia.errors import CharoniaError

from .networks import Network, encoder, resnet
from .outcome import FAILED, NOT_RUN, PASSED, Outcome, judged
from .serving import Array, Served, has_backend, saturate, write_model, write_torch_model

_SECONDS = {"cuda": 5.0, "cpu": 1.0}
_UNPINNED = "optimization { input_pinned_memory { enable: false } output_pinned_memory { enable: false } }"
_OWN_STREAM = 'parameters { key: "charonia.own_stream" value { string_value: "true" } }'
_UNPINNED_ONE = "1_unpinned"
_VARIANTS = {"1": (1, ""), "2": (2, ""), _UNPINNED_ONE: (1, _UNPINNED)}
"""By the end of a model's name: how many instances it has, and what else its configuration says."""


def saturation(device: str) -> Outcome:
    """Rows a second at saturation, served by one and two instances and without pinned staging, against bare."""
    seconds = _SECONDS[device]
    networks = {"resnet": resnet(device), "encoder": encoder(device)}
    values: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, network in networks.items():
            script = network.script()
            config = f"max_batch_size: {len(network.array)} {network.tensors}"
            for variant, (count, more) in _VARIANTS.items():
                write_torch_model(Path(folder), f"{name}_{variant}", script, device, f"{config} {more}", count=count)
        for name, network in networks.items():
            values[f"{name}_bare"] = bare_rate(network, seconds)
        with Served(Path(folder)) as server:
            for name, network in networks.items():
                for variant in _VARIANTS:
                    load = saturate(
                        *(server.url, f"{name}_{variant}", "INPUT__0", network.array, network.answer),
                        in_flight=4,
                        seconds=seconds,
                    )
                    values[f"{name}_{variant}"] = load.rate
    return judged_rates(device, list(networks), values)


def judged_rates(device: str, networks: Sequence[str], values: dict[str, float]) -> Outcome:
    """The outcome of `saturation`: each variant of each network has to reach the goal, but those without pinned
    memory, which show what it is for.
    """
    figures, ratios = [], []
    for name in networks:
        own = [values[f"{name}_{variant}"] / values[f"{name}_bare"] for variant in _VARIANTS]
        ratios += [ratio for ratio, variant in zip(own, _VARIANTS, strict=True) if variant != _UNPINNED_ONE]
        figures.append(f"{name} {values[f'{name}_bare']:.0f} bare, {'/'.join(f'{one:.2f}' for one in own)}x")
    return judged(device, min(ratios) >= 0.95, ", ".join(figures) + " (rows/s)", values, _served_by())


def graphs(device: str) -> Outcome:
    """Latency of one row, served with CUDA graphs, against the bare module's graph."""
    network = resnet(device)
    one = network.rows(1)
    bare_ms = _bare_ms(network, one)
    with tempfile.TemporaryDirectory() as folder:
        config = f"max_batch_size: 8 {network.tensors} optimization {{ cuda {{ graphs: true }} }}"
        write_torch_model(Path(folder), "m", network.script(), device, config)
        with Served(Path(folder)) as server:
            name, shape, kind = network.answer
            answer = (name, (1, *shape[1:]), kind)
            load = saturate(server.url, "m", "INPUT__0", one, answer, in_flight=1, seconds=2 * _SECONDS[device])
    figure = f"p50 {load.p50_ms:.2f} ms, bare {bare_ms:.2f} ms"
    values = {"p50_ms": load.p50_ms, "bare_ms": bare_ms}
    return judged(device, load.p50_ms <= bare_ms + 0.3, figure, values, _served_by())


def batching(device: str) -> Outcome:
    """Rows a second of single rows, 8 in flight: without and with dynamic batching, then one and two instances."""
    network = encoder(device)
    one, (name, shape, kind) = network.rows(1), network.answer
    script = network.script()
    values = {}
    with tempfile.TemporaryDirectory() as folder:
        config = f"max_batch_size: 8 {network.tensors}"
        for model, more, count in (("off", "", 1), ("on", "dynamic_batching { }", 1), ("two", _OWN_STREAM, 2)):
            write_torch_model(Path(folder), model, script, device, f"{config} {more}", count=count)
        with Served(Path(folder)) as server:
            for model in ("off", "on", "two"):
                load = saturate(
                    *(server.url, model, "INPUT__0", one, (name, (1, *shape[1:]), kind)),
                    in_flight=8,
                    seconds=_SECONDS[device],
                )
                values[model] = load.rate
    batched, instances = values["on"] / values["off"], values["two"] / values["off"]
    figure = f"{values['off']:.0f} → {values['on']:.0f} rows/s ({batched:.1f}x), 2 instances {instances:.1f}x"
    return judged(device, batched >= 3.7 and instances >= 1.5, figure, values, _served_by())


def compiled(device: str) -> Outcome:
    """An AOTInductor package that is built here: its answers, and its refusal of inputs that do not fit."""
    if not has_backend("pytorch"):
        return Outcome(NOT_RUN, reason="the backend pytorch is not installed")
    from torch import _inductor as inductor

    module = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)).eval().to(device)
    array = np.random.default_rng(3).random((4, 64), np.float32)
    example = torch.from_numpy(array).to(device)
    rows = torch.export.Dim("rows", min=1, max=8)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        package = Path(folder) / "model.pt2"
        began = time.monotonic()
        program = torch.export.export(module, (example,), dynamic_shapes=({0: rows},))
        inductor.aoti_compile_and_package(program, package_path=str(package))
        took_s = time.monotonic() - began
        wanted = module(example).cpu().numpy()
        models = Path(folder) / "models"
        kind = "KIND_GPU" if device == "cuda" else "KIND_CPU"
        config = (
            f'platform: "torch_aoti" max_batch_size: 8 instance_group {{ kind: {kind} }} '
            'input { name: "INPUT__0" data_type: TYPE_FP32 dims: -1 } '
            'output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 8 }'
        )
        write_model(models, "m", config, {"model.pt2": package.read_bytes()})
        with Served(models, f"--allow-native-models={models}") as server, Client(server.url) as client:
            server.wait_ready("m")
            found = client.infer("m", {"INPUT__0": array})["OUTPUT__0"]
            refused = _refused(client, array[:, :32])
            again = client.infer("m", {"INPUT__0": array})["OUTPUT__0"]
    difference = float(max(np.abs(found - wanted).max(), np.abs(again - wanted).max()))
    figure = f"differs by {difference:.1e}, a wrong shape is {'refused' if refused else 'ANSWERED'}"
    verdict = PASSED if difference <= 1e-3 and refused else FAILED
    return Outcome(verdict, figure, f"compiled in {took_s:.0f} s", {"difference": difference, "compile_s": took_s})


def bare_rate(network: Network, seconds: float) -> float:
    """Rows a second of the module alone: pinned input to the device, the module, output to the host."""
    given = torch.from_numpy(network.array)
    if network.device == "cuda":
        given = given.pin_memory()

    def run() -> None:
        network.module(given.to(network.device, non_blocking=True)).cpu()

    return len(network.array) / _mean_s(run, seconds)


def _bare_ms(network: Network, one: Array) -> float:
    """The usual time of one row: with a CUDA graph on a GPU."""
    given = torch.from_numpy(one)
    if network.device != "cuda":
        return _median_ms(lambda: network.module(given))
    with torch.inference_mode():
        static = given.cuda()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                network.module(static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = network.module(static)

    def run() -> None:
        static.copy_(given)
        graph.replay()
        answer.cpu()

    return _median_ms(run)


def _mean_s(run: Callable[[], object], seconds: float) -> float:
    with torch.inference_mode():
        for _ in range(3):
            run()
        began, count = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            run()
            count += 1
        return (time.monotonic() - began) / count


def _median_ms(run: Callable[[], object]) -> float:
    times = []
    with torch.inference_mode():
        for _ in range(60):
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1e3)
    return float(np.median(times[10:]))


def _refused(client: Client, array: Array) -> bool:
    try:
        client.infer("m", {"INPUT__0": array})
    except CharoniaError:
        return True
    return False


def _served_by() -> str:
    return "" if has_backend("pytorch") else "served by python models, as the backend pytorch is not installed"
