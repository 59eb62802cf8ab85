"""onnxruntime: a bare session with I/O binding and a CUDA graph, against the same model served."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from .outcome import FAILED, NOT_RUN, Outcome, judged
from .serving import Array, Served, saturate, write_model

_LAYERS = 8
_CAPTURES = 4
_GRAPH = (
    'optimization { execution_accelerators { gpu_execution_accelerator { name: "cuda" '
    'parameters { key: "enable_cuda_graph" value: "1" } } } }'
)


def onnxruntime(device: str) -> Outcome:
    """Rows a second at saturation of a stack of matrix products: bare and served, on a GPU with CUDA graphs as well."""
    import onnxruntime as ort

    cuda = device == "cuda"
    if cuda and "CUDAExecutionProvider" not in ort.get_available_providers():
        return Outcome(NOT_RUN, reason="the installed onnxruntime has no CUDA provider: install charonia[gpu]")
    width, rows, seconds = (4096, 64, 5.0) if cuda else (64, 8, 1.0)
    model = _model(width)
    array = np.random.default_rng(5).random((rows, width), np.float32)
    bare, graph, answer = _bare(ort, model, array, cuda, seconds)
    kind = "KIND_GPU" if cuda else "KIND_CPU"
    tensors = " ".join(
        f'{side} {{ name: "{name}" data_type: TYPE_FP32 dims: {width} }}'
        for side, name in (("input", "x"), ("output", "y"))
    )
    config = f'backend: "onnxruntime" max_batch_size: {rows} {tensors} instance_group {{ kind: {kind} count: 2 }}'
    variants = {"m": (config, bare), "graph": (f"{config} {_GRAPH}", graph)} if cuda else {"m": (config, bare)}
    values = {"bare": bare, "bare_graph": graph}
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (text, _) in variants.items():
            write_model(Path(folder), name, text, {"model.onnx": model})
        with Served(Path(folder)) as server:
            from charonia.client import Client

            for name, (_, own) in variants.items():
                with Client(server.url) as client:
                    for _ in range(_CAPTURES):  # the graph is captured, then replayed
                        found = client.infer(name, {"x": array})["y"]
                if not np.allclose(found, answer, rtol=1e-3, atol=1e-4):
                    return Outcome(FAILED, reason=f"the served model {name} answers otherwise than the session")
                load = saturate(
                    *(server.url, name, "x", array, ("y", answer.shape, np.float32)), in_flight=4, seconds=seconds
                )
                values[f"served_{name}"], ratios[name] = load.rate, load.rate / own
    figure = f"{bare:.0f} bare, {ratios['m']:.2f}x served"
    if cuda:
        figure += f"; {graph:.0f} with a CUDA graph, {ratios['graph']:.2f}x served"
    return judged(device, min(ratios.values()) >= 0.95, f"{figure} (rows/s)", values)


def _model(width: int) -> bytes:
    from onnx import TensorProto, helper

    weights = (np.random.default_rng(6).standard_normal((width, width)) / np.sqrt(width)).astype(np.float32)
    # one set of weights for all layers: the file stays below 2 GiB
    constant = helper.make_tensor("w", TensorProto.FLOAT, weights.shape, weights.tobytes(), raw=True)
    names = ["x", *(f"t{index}" for index in range(_LAYERS - 1)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], "w"], [names[i + 1]]) for i in range(_LAYERS)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("n", width)) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [constant])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(made.SerializeToString())


def _bare(ort: Any, model: bytes, array: Array, cuda: bool, seconds: float) -> tuple[float, float, Array]:
    """Rows a second of a session, and with a CUDA graph (0 on a CPU); and its answer."""
    place = "cuda" if cuda else "cpu"
    rates = []
    for captured in (False, True) if cuda else (False,):
        options = {"enable_cuda_graph": "1"} if captured else {}
        provider = ("CUDAExecutionProvider", options) if cuda else "CPUExecutionProvider"
        session = ort.InferenceSession(model, providers=[provider])
        binding = session.io_binding()
        given = ort.OrtValue.ortvalue_from_numpy(array, place, 0)
        found = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, np.float32, place, 0)
        binding.bind_ortvalue_input("x", given)
        binding.bind_ortvalue_output("y", found)
        for _ in range(3):
            session.run_with_iobinding(binding)
        began, count = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            given.update_inplace(array)  # a request's bytes have to get there, and back
            session.run_with_iobinding(binding)
            answer = found.numpy()
            count += 1
        rates.append(len(array) * count / (time.monotonic() - began))
    return rates[0], rates[1] if cuda else 0.0, answer
