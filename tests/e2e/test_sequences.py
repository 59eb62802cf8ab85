"""Sequence batching as clients meet it (S30-S43): one server over models of both strategies, states kept and told."""

from __future__ import annotations

import queue
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from e2e_asking import batches, client, infer, infer_json, inputs, on_the_page, settle, until
from e2e_models import put, python
from e2e_server import serving
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.e2e

KINDS = ["http", "grpc"]

TELLS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}
        self.executions = 0

    def execute(self, requests):
        self.executions += 1
        responses = []
        ready = [int(self.control(r, "READY")) for r in requests]
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "X").as_numpy().ravel()[0]
            key, flags = request.correlation_id(), request.flags()
            if flags & 1:
                self.sums[key] = 0
            sum = self.sums[key] = self.sums.get(key, 0) + value
            told = [sum, self.control(request, "START"), self.control(request, "READY"), self.control(request, "END"),
                    flags, len(requests), ready.count(1), self.executions]
            if flags & 2:
                del self.sums[key]
            named = self.control(request, "CORRID")
            named = named.decode() if isinstance(named, bytes) else str(named)
            word = f"{type(key).__name__} {key} {named}".encode()
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("TOLD", np.array([told], np.float32)),
                pb_utils.Tensor("NAME", np.array([[word]], object)),
            ]))
        return responses

    def control(self, request, name):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return 0 if tensor is None else tensor.as_numpy().ravel()[0]
"""

TELLS_IO = """
max_batch_size: 4
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "TOLD" data_type: TYPE_FP32 dims: [ 8 ] }, { name: "NAME" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""

CONTROLS = """
control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 5 ] } ] },
  { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } ] },
  { name: "END" control [ { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 0.5 ] } ] },
  { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: %s } ] }
]
"""

LONG = "max_sequence_idle_microseconds: 60000000"
IDLE_US = 1_000_000

COUNTS_DOWN = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            wanted = pb_utils.get_input_tensor_by_name(request, "X").as_numpy().ravel()[0]
            turn = pb_utils.get_input_tensor_by_name(request, "TURN").as_numpy() + 1
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy().ravel()[0]
            assert start == (turn.ravel()[0] == 1)
            after = pb_utils.Tensor("TURN_AFTER", turn)
            if turn.ravel()[0] < wanted:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                responses.append(pb_utils.InferenceResponse([after]))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("TURNS", turn), after]))
        return responses
"""


def graph(nodes: list[Any], inputs_: dict[str, list[Any]], outputs: dict[str, list[Any]]) -> bytes:
    from onnx import TensorProto, helper

    def tensors(shapes: dict[str, list[Any]]) -> list[Any]:
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in shapes.items()]

    made = helper.make_graph(nodes, "sequence", tensors(inputs_), tensors(outputs))
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return bytes(model.SerializeToString())


def adding() -> bytes:
    """SUM = X + BEFORE, which is what AFTER is as well: batches of [rows, 1]."""
    from onnx import helper

    nodes = [helper.make_node("Add", ["X", "BEFORE"], ["SUM"]), helper.make_node("Identity", ["SUM"], ["AFTER"])]
    rows = ["rows", 1]
    return graph(nodes, {"X": rows, "BEFORE": rows}, {"SUM": rows, "AFTER": rows})


def growing() -> bytes:
    """ALL = BEFORE and then X: a state that becomes longer."""
    from onnx import helper

    nodes = [helper.make_node("Concat", ["BEFORE", "X"], ["ALL"], axis=0)]
    return graph(nodes, {"X": [1], "BEFORE": ["n"]}, {"ALL": ["m"]})


STATE = 'state [ { input_name: "BEFORE" output_name: "%s" data_type: TYPE_FP32 dims: [ %s ] %s } ]'


def build(repository: Path) -> None:
    direct = CONTROLS % "TYPE_UINT64"
    python(repository, "direct", TELLS, TELLS_IO + f"sequence_batching {{ {LONG} direct {{ }} {direct} }}")
    words = CONTROLS % "TYPE_STRING"
    python(
        repository,
        "oldest",
        TELLS,
        TELLS_IO + f"sequence_batching {{ {LONG} oldest {{ max_candidate_sequences: 8 }} {words} }}",
    )
    python(
        repository,
        "idles",
        TELLS,
        TELLS_IO.replace("max_batch_size: 4", "max_batch_size: 1")
        + f"sequence_batching {{ max_sequence_idle_microseconds: {IDLE_US} direct {{ }} {direct} }}",
    )
    fp32 = "data_type: TYPE_FP32 dims: [ 1 ] } ]"
    warm = 'model_warmup { name: "w" inputs { key: "X" value { data_type: TYPE_FP32 dims: 1 zero_data: true } } }'
    for name, strategy in (("adds", "oldest { max_candidate_sequences: 64 }"), ("adds_direct", "direct { }")):
        put(repository / name / "1" / "model.onnx", adding())
        put(
            repository / name / "config.pbtxt",
            f'backend: "onnxruntime" max_batch_size: 8 input [ {{ name: "X" {fp32} output [ {{ name: "SUM" {fp32} '
            f"instance_group [ {{ count: 2 kind: KIND_CPU }} ] {warm} "
            f"sequence_batching {{ {LONG} {strategy} {STATE % ('AFTER', '1', '')} }}",
        )
    initial = 'initial_state: [ { name: "two" data_type: TYPE_FP32 dims: [ 2 ] data_file: "two.bin" } ]'
    put(repository / "grows" / "1" / "model.onnx", growing())
    put(repository / "grows" / "initial_state" / "two.bin", struct.pack("<2f", 7, 8))
    put(
        repository / "grows" / "config.pbtxt",
        f'backend: "onnxruntime" max_batch_size: 0 input [ {{ name: "X" {fp32} '
        'output [ { name: "ALL" data_type: TYPE_FP32 dims: [ -1 ] } ] '
        f"sequence_batching {{ {LONG} {STATE % ('ALL', '-1', initial)} }}",
    )
    maps = 'input_map { key: "X" value: "X" } output_map { key: "SUM" value: "SUM" }'
    put(repository / "wraps" / "1" / "empty", "")
    put(
        repository / "wraps" / "config.pbtxt",
        f'platform: "ensemble" max_batch_size: 8 input [ {{ name: "X" {fp32} output [ {{ name: "SUM" {fp32} '
        f'ensemble_scheduling {{ step [ {{ model_name: "adds" model_version: -1 {maps} }} ] }}',
    )
    one = "data_type: TYPE_INT32 dims: [ 1 ]"
    python(
        repository,
        "counts",
        COUNTS_DOWN,
        f'max_batch_size: 4 input [ {{ name: "X" {one} }} ] output [ {{ name: "TURNS" {one} }} ] '
        "sequence_batching { iterative_sequence: true oldest { max_candidate_sequences: 4 } control_input [ { "
        'name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ] '
        f'state [ {{ input_name: "TURN" output_name: "TURN_AFTER" {one} }} ] }}',
    )


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    repository = tmp_path_factory.mktemp("sequences")
    build(repository)
    with serving(repository, tmp_path_factory.mktemp("state")) as server:
        yield server


def step(
    server: Any, model: str, number: int | str, value: int, flags: str = "", kind: str = "http", dtype: type = np.int32
) -> Any:
    """One request of a sequence; `flags` has s for START and e for END."""
    options = {"sequence_id": number, "sequence_start": "s" in flags, "sequence_end": "e" in flags}
    return infer(server, model, kind, options, X=np.array([[value]], dtype))


def sum_of(result: Any) -> float:
    return float(result.as_numpy("TOLD")[0, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_direct_sequence_is_told_what_it_is(sequences: Any, kind: str) -> None:
    number = 2**63 - 1 if kind == "grpc" else 2**64 - 1
    answers = [step(sequences, "direct", number, v, f, kind) for v, f in [(1, "s"), (2, ""), (3, "e")]]
    told = [answer.as_numpy("TOLD")[0].tolist() for answer in answers]
    assert [one[0] for one in told] == [1, 3, 6]
    assert [one[1:5] for one in told] == [[5, 1, 0, 1], [0, 1, 0, 0], [0, 1, 0.5, 2]]
    assert answers[0].as_numpy("NAME")[0, 0] == f"int {number} {number}".encode()


def test_an_empty_slot_gets_a_request_that_is_not_ready(sequences: Any) -> None:
    """S34: a python model gets it as a request like any other, but for READY."""
    none_lives = re.compile(r'^charonia_live_sequences\{model="direct"\} 0(\.0)?$', re.M)
    until("the slots are free", lambda: none_lives.search(sequences.scrape()))
    step(sequences, "direct", 51, 1, "s")
    step(sequences, "direct", 52, 10, "s")
    step(sequences, "direct", 51, 1, "e")
    settle(sequences, "direct")
    before = batches(sequences, "direct")
    told = step(sequences, "direct", 52, 10, "e").as_numpy("TOLD")[0].tolist()
    assert (told[0], told[5:7]) == (20, [2, 1])
    settle(sequences, "direct")
    assert batches(sequences, "direct") == before | {2: before.get(2, 0) + 1}, "the empty slot counts (S34)"


def test_controls_are_no_inputs_of_the_model(sequences: Any) -> None:
    with client("http", sequences) as asking:
        metadata = asking.get_model_metadata("direct")
        assert [one["name"] for one in metadata["inputs"]] == ["X"]
        assert [one["name"] for one in asking.get_model_metadata("adds")["outputs"]] == ["SUM"]
        assert "sequence" in asking.get_server_metadata()["extensions"]
    controls = [("X", [1, 1]), ("START", [1, 1])]
    body = {
        "parameters": {"sequence_id": 1, "sequence_start": True},
        "inputs": [{"name": n, "shape": s, "datatype": "INT32", "data": [1]} for n, s in controls],
    }
    status, answer = infer_json(sequences, "direct", body)
    assert status == 400
    assert "expected 1 inputs but got 2 inputs for model 'direct'. Got input(s) ['START','X']" in answer["error"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_sequence_is_refused(sequences: Any, kind: str) -> None:
    def refused(model: str, number: int | str, flags: str = "", rows: int = 1) -> str:
        options = {"sequence_id": number, "sequence_start": "s" in flags}
        with pytest.raises(InferenceServerException) as raised:
            infer(sequences, model, kind, options, X=np.ones((rows, 1), np.int32))
        assert str(raised.value.status()) in ("400", "StatusCode.INVALID_ARGUMENT")
        return str(raised.value.message())

    no_id = "inference request to model 'direct' must specify a non-zero or non-empty correlation ID"
    assert refused("direct", 0) == no_id
    start = "must specify the START flag on the first request of the sequence"
    assert refused("direct", 5) == f"inference request for sequence 5 to model 'direct' {start}"
    assert refused("oldest", "nobody") == f"inference request for sequence nobody to model 'oldest' {start}"
    one = "must specify batch-size 1 due to requirements of sequence batcher"
    assert refused("direct", 5, "s", rows=2) == f"inference request to model 'direct' {one}"
    assert refused("direct", "text", "s") == (
        "sequence batching control 'CORRID' data-type is 'BYTES', but model 'direct' expects 'UINT64'"
    )
    with pytest.raises(InferenceServerException, match="string correlation ID cannot be longer than 128 chara"):
        infer(
            sequences, "oldest", kind, {"sequence_id": "x" * 129, "sequence_start": True}, X=np.ones((1, 1), np.int32)
        )
    step(sequences, "direct", 5, 1, "se", kind)
    assert refused("direct", 5).endswith(start), "after END the id is free"


def test_a_start_on_a_live_sequence_begins_anew(sequences: Any) -> None:
    values = [(1, "s"), (2, ""), (5, "s"), (1, "e")]
    assert [sum_of(step(sequences, "direct", 9, value, flags)) for value, flags in values] == [1, 3, 5, 6]
    assert "sequence 9 for model 'direct' has a conflict. The previous sequence did not end" in sequences.log()


def test_strings_name_sequences(sequences: Any) -> None:
    first = step(sequences, "oldest", "call-é", 1, "s")
    second = step(sequences, "oldest", "call", 10, "s", "grpc")
    assert first.as_numpy("NAME")[0, 0] == "str call-é call-é".encode()
    assert sum_of(step(sequences, "oldest", "call-é", 2, "e", "grpc")) == 3
    assert sum_of(step(sequences, "oldest", "call", 20, "e")) == 30
    assert sum_of(second) == 10


def before_it_rests_too_long(sequences: Any, asked: Callable[[], Any]) -> Any:
    """What comes of asking while sequence 1 has the only slot of `idles`, which it begins as often as needed.

    Nothing may be concluded where the machine was so busy that the sequence rested too long before the answer came.
    """

    def tried() -> Any:
        began_s = time.monotonic()
        assert sum_of(step(sequences, "idles", 1, 1, "s")) == 1
        try:
            found = asked()
        except InferenceServerException as error:
            found = error
        return time.monotonic() - began_s < IDLE_US / 1e6 and found

    return until("a sequence goes on before it has rested too long", tried)


def test_a_sequence_that_rests_too_long_is_over_and_others_wait_for_its_slot(sequences: Any) -> None:
    """One slot (S34), whole sequences wait for it (S37), the idle time frees it (S38)."""
    with ThreadPoolExecutor(1) as pool:
        assert sum_of(before_it_rests_too_long(sequences, lambda: step(sequences, "idles", 1, 1))) == 2
        waiting = pool.submit(step, sequences, "idles", 2, 10, "s")
        assert sum_of(waiting.result(60)) == 10
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        step(sequences, "idles", 1, 1)
    options = {"sequence_id": 3, "sequence_start": True, "timeout": 50_000}
    refused = before_it_rests_too_long(
        sequences, lambda: infer(sequences, "idles", "grpc", options, X=np.array([[1]], np.int32))
    )
    assert refused.message() == "timeout of the corresponding sequence has been expired"
    until("the slot is free again", lambda: sum_of(step(sequences, "idles", 4, 4, "se")) == 4)


def test_a_stream_answers_in_order_without_waiting(sequences: Any) -> None:
    """Requests of several sequences in one stream, sent without waiting for answers (G23)."""
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(sequences.grpc) as asking:
        asking.start_stream(lambda result, error: answers.put((result, error)))
        for at in range(30):
            for number in range(1, 5):
                asking.async_stream_infer(
                    "adds",
                    inputs("grpc", X=np.array([[number]], np.float32)),
                    request_id=f"{number}/{at}",
                    sequence_id=1000 + number,
                    sequence_start=at == 0,
                    sequence_end=at == 29,
                )
        found = [answers.get(timeout=60) for _ in range(120)]
        asking.stop_stream()
    assert [error for _, error in found if error] == []
    seen = [(result.get_response().id, float(result.as_numpy("SUM")[0, 0])) for result, _ in found]
    assert seen == [(f"{n}/{at}", n * (at + 1)) for at in range(30) for n in range(1, 5)]


@pytest.mark.parametrize("model", ["adds", "adds_direct"])
def test_many_sequences_share_batches_and_keep_their_sums(sequences: Any, model: str) -> None:
    """Of 24 sequences 16 have a direct slot at a time."""
    wrong: list[Any] = []

    def run(number: int) -> None:
        with client("http", sequences) as asking:
            for at in range(8):
                options = {"sequence_id": number, "sequence_start": at == 0, "sequence_end": at == 7}
                answer = asking.infer(model, inputs("http", X=np.array([[number]], np.float32)), **options)
                if float(answer.as_numpy("SUM")[0, 0]) != number * (at + 1):
                    wrong.append((number, at))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_a_state_begins_with_a_file_and_grows(sequences: Any) -> None:
    options = [
        {"sequence_id": "g", "sequence_start": True},
        {"sequence_id": "g"},
        {"sequence_id": "g", "sequence_end": True},
    ]
    answers = [
        infer(sequences, "grows", "grpc", option, X=np.array([value], np.float32)).as_numpy("ALL").tolist()
        for value, option in enumerate(options)
    ]
    assert answers == [[7, 8, 0], [7, 8, 0, 1], [7, 8, 0, 1, 2]], "listed as an output, a state is told as well"


def test_a_model_may_ask_for_another_turn(sequences: Any) -> None:
    """Iterative sequences (S41): no id is needed, and one answer comes after as many turns as the model wants."""
    with ThreadPoolExecutor(4) as pool:
        wanted = [1, 5, 9, 3]
        answers = [
            pool.submit(infer, sequences, "counts", kind, X=np.array([[turns]], np.int32))
            for turns, kind in zip(wanted, KINDS * 2, strict=True)
        ]
        assert [int(answer.result(60).as_numpy("TURNS")[0, 0]) for answer in answers] == wanted


def test_an_ensemble_hands_its_sequence_on(sequences: Any) -> None:
    """S52."""
    options = [{"sequence_start": True}, {}, {"sequence_end": True}]
    asked = [{"sequence_id": 4711} | option for option in options]
    answers = [
        infer(sequences, "wraps", "http", option, X=np.array([[value]], np.float32)).as_numpy("SUM")
        for value, option in enumerate(asked, 1)
    ]
    assert [float(answer[0, 0]) for answer in answers] == [1, 3, 6]


def test_it_is_counted(sequences: Any) -> None:
    step(sequences, "direct", 31, 1, "s")
    on_the_page(sequences, 'charonia_live_sequences{model="direct"}')
    step(sequences, "direct", 31, 1, "e")
