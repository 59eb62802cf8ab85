"""`python -m loadtest.many_models`: many models on executors with room for few, and what turning them costs.

Builds models that multiply by a table of their own, starts `charonia serve` with a budget, asks random models in a
closed loop and checks every answer. Popularity falls with the model's number (Zipf), as it does where there are many.
Prints one JSON document; exits with 1 when an answer was wrong or missing, or an executor held more than it may.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from .bench.processes import load_roles, pss_bytes_by_role
from .bench.servers import Charonia
from .model import LoadTestError, split_url

WIDTH = 4
_ASK_TIMEOUT_S = 120
_LOOK_S = 0.2


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="loadtest.many_models", description="Models that take turns in memory.")
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--executors", type=int, default=2)
    parser.add_argument("--model-mib", type=int, default=8, help="size of one model's weights")
    parser.add_argument("--holds", type=int, default=20, help="models that fit into memory, over all executors")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--zipf", type=float, default=1.1, help="0: all models are asked alike")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def build(repository: Path, count: int, model_mib: int) -> None:
    """ONNX models: x [batch, WIDTH] times the model's number plus one; the table of weights is only there to be big."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(3)
    rows = model_mib * 1024 * 1024 // (4 * WIDTH)
    for number in range(count):
        table = rng.standard_normal((rows, WIDTH)).astype(np.float32)
        table[0] = number + 1
        nodes = [
            helper.make_node("Gather", ["table", "first"], ["factor"]),
            helper.make_node("Mul", ["INPUT0", "factor"], ["OUTPUT0"]),
        ]
        x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", WIDTH]) for n in ("INPUT0", "OUTPUT0"))
        first = helper.make_tensor("first", TensorProto.INT64, [1], np.array([0], np.int64))
        graph = helper.make_graph(nodes, "many", [x], [y], [numpy_helper.from_array(table, "table"), first])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        directory = repository / f"many{number}"
        (directory / "1").mkdir(parents=True)
        (directory / "1" / "model.onnx").write_bytes(model.SerializeToString())
        (directory / "config.pbtxt").write_text(
            'backend: "onnxruntime" max_batch_size: 8\n'
            f'input {{ name: "INPUT0" data_type: TYPE_FP32 dims: {WIDTH} }}\n'
            f'output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: {WIDTH} }}\n'
            "instance_group { count: 1 kind: KIND_CPU }\n"
        )


class Askers:
    """Clients that ask in a closed loop; `latencies_s` of the right answers, `problems` of the others."""

    def __init__(self, address: str, numbers: list[int], in_flight: int) -> None:
        self._host, self._port = split_url(address, 8000)
        self._numbers = iter(numbers)
        self._lock = threading.Lock()
        self.latencies_s: list[float] = []
        self.problems: list[str] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(in_flight)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_ASK_TIMEOUT_S)
        while True:
            with self._lock:
                number = next(self._numbers, -1)
            if number < 0:
                break
            problem = ""
            began = time.monotonic()
            try:
                problem = self._one(connection, number)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                problem = f"many{number}: {error!r}"
                connection.close()
            with self._lock:
                if problem:
                    self.problems.append(problem)
                else:
                    self.latencies_s.append(time.monotonic() - began)
        connection.close()

    def _one(self, connection: http.client.HTTPConnection, number: int) -> str:
        tensor = {"name": "INPUT0", "shape": [1, WIDTH], "datatype": "FP32", "data": [2.0] * WIDTH}
        connection.request("POST", f"/v2/models/many{number}/infer", json.dumps({"inputs": [tensor]}))
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            return f"many{number}: {answer.status} {body[:200].decode(errors='replace')}"
        data = json.loads(body)["outputs"][0]["data"]
        return "" if data == [2.0 * (number + 1)] * WIDTH else f"many{number}: wrong answer {data}"


def executors_of(log_url: str) -> list[dict[str, Any]]:
    """What `charonia executors ls` says."""
    command = [sys.executable, "-m", "charonia.cli", "executors", "ls", "--json", "--log-url", log_url]
    found = subprocess.run(command, capture_output=True, check=True)
    return list(json.loads(found.stdout)["executors"])


def percentile(sorted_s: list[float], share: float) -> float:
    return round(sorted_s[min(len(sorted_s) - 1, int(share * len(sorted_s)))] * 1000, 1)


def measure(options: argparse.Namespace, repository: Path) -> dict[str, Any]:
    """One run."""
    drawn = random.Random(options.seed)
    weights = [1 / (rank + 1) ** options.zipf for rank in range(options.models)]
    numbers = drawn.choices(range(options.models), weights, k=options.requests)
    holds = max(1, options.holds // options.executors)
    # what loading takes besides the weights is part of what is measured; a quarter is room for it
    budget_mib = holds * options.model_mib * 5 // 4
    flags = [f"--executors={options.executors}", f"--model-memory-budget={budget_mib}MiB", "--http-address=127.0.0.1"]
    flags.append(f"--max-loaded-models={holds}")
    report: dict[str, Any] = {"models": options.models, "executors": options.executors, "budget_mib": budget_mib}
    with Charonia(repository, [*flags, "--allow-grpc=false", "--allow-webhooks=false"]) as server:
        assert server.endpoints.http is not None
        assert server.endpoints.processes_file is not None
        report["ready_s"] = round(server.ready_s, 2)
        log_url = json.loads((server.endpoints.processes_file.parent / "endpoints.json").read_text())["log"]
        roles = load_roles(server.endpoints.processes_file)
        report["executor_pss_mib_before"] = _mib(pss_bytes_by_role(roles))
        askers = Askers(server.endpoints.http, numbers, options.in_flight)
        began = time.monotonic()
        askers.start()
        most_bytes = most_models = 0
        while askers.running():
            rows = executors_of(log_url)
            most_bytes = max(most_bytes, *(row["used_bytes"] for row in rows))
            most_models = max(most_models, sum(row["loaded"] for row in rows))
            time.sleep(_LOOK_S)
        took_s = time.monotonic() - began
        report["executor_pss_mib_after"] = _mib(pss_bytes_by_role(roles))
    latencies = sorted(askers.latencies_s)
    if not latencies:
        raise LoadTestError(f"nothing was answered: {askers.problems[:3]}")
    report |= {
        "asked": options.requests,
        "models_asked": len(set(numbers)),
        "answered": len(latencies),
        "problems": askers.problems[:10],
        "per_s": round(len(latencies) / took_s),
        "p50_ms": percentile(latencies, 0.5),
        "p95_ms": percentile(latencies, 0.95),
        "p99_ms": percentile(latencies, 0.99),
        "most_models_held": most_models,
        "most_used_mib_of_an_executor": round(most_bytes / 1024**2, 1),
    }
    kept = most_bytes <= budget_mib * 1024**2 and most_models <= holds * options.executors
    report["well"] = len(latencies) == options.requests and kept
    return report


def _mib(by_role: dict[str, int]) -> int:
    return round(sum(size for role, size in by_role.items() if role.startswith("executor")) / 1024**2)


def main() -> int:
    """The console script."""
    options = parser().parse_args()
    directory = Path(tempfile.mkdtemp(prefix="charonia-many-"))
    try:
        build(directory, options.models, options.model_mib)
        report = measure(options, directory)
    except LoadTestError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 0 if report["well"] else 1


if __name__ == "__main__":
    sys.exit(main())
