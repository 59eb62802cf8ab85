"""`python -m loadtest.drill.neighbours`: what small calls wait beside one client that sends large or hostile messages.

Serves this checkout on two models of its own, and times small HTTP calls, one at a time, in turns: alone, then beside
each kind of neighbour (`hostile_clients`), and so on, at last alone again. Printed are p50, p99 and the longest of the
small calls of all rounds, p99 as a multiple of p99 alone, what the neighbour had answered, and the largest memory of
each process meanwhile.

The control: after each kind the same small calls, beside the same client that talks as often with a `sink` instead,
which only reads and writes. No server could have a smaller p99 on this machine; what is above it is this server's own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from charonia.offload.time_slices import LOOP_SLICE_NS, set_time_slice
from loadtest.bench.processes import load_roles, parse_pss, read_parents
from loadtest.bench.servers import Charonia
from loadtest.model import LoadTestError

from .hostile_clients import KINDS, POLICIES, binary, posts

ALONE = "alone"
PAUSE_S = 0.005
"""Between small calls: they show what one of many callers waits, and leave the processors to the server."""
_WIDTH = 16


def write_models(repository: Path) -> None:
    """`numbers` and `strings` give back rows of any length."""
    import onnx
    from onnx import TensorProto, helper

    for name, element, kind in (("numbers", TensorProto.FLOAT, "FP32"), ("strings", TensorProto.STRING, "STRING")):
        ends = [helper.make_tensor_value_info(end, element, ["N", "M"]) for end in ("INPUT0", "OUTPUT0")]
        node = helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])
        graph = helper.make_graph([node], name, ends[:1], ends[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        (repository / name / "1").mkdir(parents=True)
        onnx.save(model, str(repository / name / "1" / "model.onnx"))
        tensors = "".join(
            f'{way} [ {{ name: "{end}" data_type: TYPE_{kind} dims: [ -1 ] }} ]\n'
            for way, end in (("input", "INPUT0"), ("output", "OUTPUT0"))
        )
        text = f'name: "{name}"\nbackend: "onnxruntime"\nmax_batch_size: 8\n{tensors}'
        (repository / name / "config.pbtxt").write_text(text)


@dataclass
class Beside:
    """Small calls beside one kind of neighbour: their times in ms, and what the neighbour had meanwhile."""

    kind: str
    times_ms: list[float] = field(default_factory=list)
    failed: int = 0
    answered: int = 0
    refused: int = 0
    answer_bytes: int = 0
    """Size of its last answer."""
    memory_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    control: Beside | None = None
    """The same beside a sink."""

    def add(self, other: Beside) -> None:
        """Another round."""
        self.times_ms += other.times_ms
        self.failed += other.failed
        self.answered += other.answered
        self.refused += other.refused
        for role, size in other.memory_bytes.items():
            self.memory_bytes[role] = max(self.memory_bytes[role], size)
        if other.control is not None:
            self.control = self.control or Beside(self.kind)
            self.control.add(other.control)

    def quantile(self, share: float) -> float:
        ordered = sorted(self.times_ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def small_calls(address: str, seconds: float, found: Beside) -> None:
    """One call at a time for so long.

    The calling thread stands for a client on another machine: it does not wait for the processors of this one.
    """
    set_time_slice(LOOP_SLICE_NS, inherited=False)
    body, headers = binary(_WIDTH, bytes(4 * _WIDTH), parameters={"binary_data_output": True})
    post = posts(address, "numbers", body, headers)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        began_s = time.monotonic()
        found.failed += not post()[0]
        found.times_ms.append((time.monotonic() - began_s) * 1000)
        time.sleep(PAUSE_S)


def watch_memory(processes_file: Path, found: Beside, seconds: float) -> None:
    """Note the largest proportional set size of every process: listed ones by role, those they started as workers."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(0.25)
        with suppress(OSError, ValueError):
            roles, parents = load_roles(processes_file), read_parents()
            workers = {pid: f"{roles[parent]}'s worker" for pid, parent in parents.items() if parent in roles}
            for pid, role in {**workers, **roles}.items():
                with suppress(OSError, ValueError):
                    size = parse_pss(Path(f"/proc/{pid}/smaps_rollup").read_text())
                    found.memory_bytes[role] = max(found.memory_bytes[role], size)


def _started(stack: ExitStack, *words: str) -> subprocess.Popen[str]:
    """A process that ends with the stack."""
    command = [sys.executable, "-m", *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


class Measurement:
    """Small calls to one server, beside neighbours with this policy."""

    def __init__(self, server: Charonia, seconds: float, policy: str) -> None:
        where = server.endpoints
        assert where.http is not None
        assert where.grpc is not None
        assert where.processes_file is not None
        self._http, self._grpc, self._processes_file = where.http, where.grpc, where.processes_file
        self._seconds = seconds
        self._policy = policy

    def alone(self, seconds: float = 0.0) -> Beside:
        found = Beside(ALONE)
        small_calls(self._http, seconds or self._seconds, found)
        watch_memory(self._processes_file, found, 0.5)
        return found

    def beside(self, kind: str) -> Beside:
        """Beside a neighbour that asks the server. Raises LoadTestError."""
        found = Beside(kind)
        with ExitStack() as stack:
            self._ask_beside(found, stack, self._http, self._grpc)
            # not meanwhile: to read a process's memory map holds it up, the longer the more it has
            watch_memory(self._processes_file, found, self._seconds / 2)
        return found

    def beside_sink(self, kind: str, like: Beside) -> Beside:
        """Beside the same neighbour, which asks a sink that answers as often and as much. Raises LoadTestError."""
        found = Beside(kind)
        with ExitStack() as stack:
            interval_s = self._seconds / max(1, like.answered + like.refused)
            sink = _started(stack, "loadtest.drill.sink", str(interval_s), str(like.answer_bytes))
            assert sink.stdout is not None
            addresses = sink.stdout.readline().split()
            if len(addresses) != 2:
                raise LoadTestError("the sink could not be started")
            self._ask_beside(found, stack, *addresses)
        return found

    def _ask_beside(self, found: Beside, stack: ExitStack, http_address: str, grpc_address: str) -> None:
        """Small calls to the server beside a neighbour that asks these addresses; it goes on after them."""
        neighbour = _started(
            stack, "loadtest.drill.hostile_clients", found.kind, self._policy, http_address, grpc_address
        )
        lines = neighbour.stdout
        assert lines is not None
        if lines.readline() != "made\n":
            raise LoadTestError(f"the neighbour {found.kind} could not make its messages")
        over = threading.Event()

        def read() -> None:
            for line in lines:
                if over.is_set():
                    continue
                outcome, _, size = line.partition(" ")
                found.answer_bytes = int(size)
                if outcome == "answered":
                    found.answered += 1
                else:
                    found.refused += 1

        threading.Thread(target=read, daemon=True).start()
        small_calls(self._http, self._seconds, found)
        over.set()


def table(results: Sequence[Beside]) -> str:
    """The results as a Markdown table; the first are those alone."""
    base = results[0].quantile(0.99)
    lines = [
        "| beside | calls | failed | p50 ms | p99 ms | longest ms | p99 of alone | beside a sink, of alone "
        "| neighbour's | its sink's | memory MiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        memory = ", ".join(f"{role} {size >> 20}" for role, size in sorted(one.memory_bytes.items()))
        p99, control = one.quantile(0.99), one.control
        sink = f"{control.quantile(0.99) / base:.1f}" if control is not None else ""
        had = f"{control.answered} answered" if control is not None else ""
        lines.append(
            f"| {one.kind} | {len(one.times_ms)} | {one.failed} | {one.quantile(0.5):.1f} | {p99:.1f} | "
            f"{max(one.times_ms):.0f} | {p99 / base:.1f} | {sink} | {one.answered} answered, {one.refused} refused | "
            f"{had} | {memory} |"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.drill.neighbours",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="A,B,…", help="neighbours (default all)")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="per kind and round (default 10)")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="in turns (default 1)")
    parser.add_argument(
        "--neighbour-policy",
        choices=sorted(POLICIES),
        default="idle",
        help="processors of the neighbour: what the server leaves, as if it were on another machine (default), "
        "or its share",
    )
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="source tree to serve (default this one)")
    parser.add_argument("--serve-option", action="append", default=[], metavar="OPTION", help="for charonia serve")
    options = parser.parse_args(words)
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds must be of {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="loadtest-neighbours-") as home:
        write_models(Path(home))
        with Charonia(Path(home), options.serve_option, options.checkout) as server:
            measurement = Measurement(server, options.seconds, options.neighbour_policy)
            measurement.alone(1.0)  # what is loaded by the first calls
            alone, beside = Beside(ALONE), {kind: Beside(kind) for kind in kinds}
            for _ in range(options.rounds):
                alone.add(measurement.alone())
                for kind in kinds:
                    found = measurement.beside(kind)
                    found.control = measurement.beside_sink(kind, found)
                    beside[kind].add(found)
                    print(f"{kind}: p99 {found.quantile(0.99):.1f} ms", file=sys.stderr, flush=True)
            alone.add(measurement.alone())
    print(table([alone, *beside.values()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
