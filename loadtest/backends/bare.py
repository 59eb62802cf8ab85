"""The library of a backend alone in a process: one thread, the same requests as the server gets, one after another.

`python -m loadtest.backends.bare SUBJECT LIBRARY DIRECTORY` writes its answer to the first request as JSON, then for
each line of its input, a number of seconds, the calls, seconds and CPU seconds of all its threads (`Bare`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from loadtest.model import LoadTestError

from .subjects import SUBJECTS, Array, Subject

_WARM_CALLS = 5
"""TorchScript compiles in its second execution."""
_WARM_S = 0.2
_STOP_S = 20.0


def _onnxruntime(path: Path) -> Callable[[Array], Array]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda rows: session.run(None, {"INPUT0": rows})[0]


def _openvino(path: Path) -> Callable[[Array], Array]:
    import openvino

    core = openvino.Core()
    settings = {"INFERENCE_NUM_THREADS": "1", "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": "1"}
    request = core.compile_model(core.read_model(path), "CPU", settings).create_infer_request()
    return lambda rows: request.infer([rows], share_inputs=True)[0]


def _torch(module: Callable[[Any], Any], torch: Any) -> Callable[[Array], Array]:
    torch.set_num_threads(1)

    def run(rows: Array) -> Array:
        with torch.inference_mode():
            answer: Array = module(torch.from_numpy(rows)).numpy()
            return answer

    return run


def _torchscript(path: Path) -> Callable[[Array], Array]:
    import torch

    return _torch(torch.jit.load(str(path)).eval(), torch)


def _pt2(path: Path) -> Callable[[Array], Array]:
    import torch

    return _torch(torch.export.load(str(path)).module(), torch)


def _trees(path: Path) -> Callable[[Array], Array]:
    return _onnxruntime(path.with_suffix(".onnx"))


def _xgboost(path: Path) -> Callable[[Array], Array]:
    import xgboost

    booster = xgboost.Booster({"nthread": 1}, model_file=str(path))
    return lambda rows: booster.inplace_predict(rows)[:, None]


def _litert(path: Path) -> Callable[[Array], Array]:
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(model_path=str(path), num_threads=1).get_signature_runner()
    return lambda rows: runner(x=rows)["y"]


LIBRARIES: dict[str, Callable[[Path], Callable[[Array], Array]]] = {
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
    "torchscript": _torchscript,
    "pt2": _pt2,
    "trees": _trees,
    "xgboost": _xgboost,
    "litert": _litert,
}


class Bare:
    """The child process; a context manager. `answer` is that to the first request.

    Raises LoadTestError when the library is not installed or the process ends.
    """

    def __init__(self, subject: Subject, library: str, directory: Path) -> None:
        command = [sys.executable, "-m", "loadtest.backends.bare", subject.name, library, str(directory)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
        self._process: subprocess.Popen[str] = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
        self._rows = subject.bare_rows or subject.rows
        self.answer: list[float] = self._read()

    def __enter__(self) -> Bare:
        return self

    def measure(self, seconds: float) -> tuple[float, float]:
        """Rows a second, and CPU microseconds a row."""
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)
        calls, wall_s, cpu_s = self._read()
        return calls * self._rows / wall_s, cpu_s * 1e6 / (calls * self._rows)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LoadTestError(f"{' '.join(self._process.args[1:5])} ended with {self._process.wait()}")  # type: ignore[index]
        return json.loads(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _main(subject: Subject, library: str, directory: Path) -> None:
    run, contents = LIBRARIES[library](directory / subject.file), subject.contents()
    print(json.dumps(run(contents[0]).ravel().tolist()), flush=True)
    contents = subject.contents(subject.bare_rows)
    for _ in range(_WARM_CALLS):
        run(contents[0])
    for line in sys.stdin:
        for until_s, is_measured in ((_WARM_S, False), (float(line), True)):
            calls, began, cpu_s = 0, time.perf_counter(), time.process_time()
            while (wall_s := time.perf_counter() - began) < until_s:
                run(contents[calls % len(contents)])
                calls += 1
            if is_measured:
                print(json.dumps([calls, wall_s, time.process_time() - cpu_s]), flush=True)


if __name__ == "__main__":
    _main(SUBJECTS[sys.argv[1]], sys.argv[2], Path(sys.argv[3]))
