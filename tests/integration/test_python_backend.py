"""Python models that execute: requests in, answers and errors out, with real model files in real model processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from python_instances import ECHO, Load, error_of, numbers, request

from charonia.backend import RequestInstance
from charonia.errors import ErrorCode
from charonia.tensors import Tensor

ADD_SUB = """
    class TritonPythonModel:
        def execute(self, requests):
            responses = []
            for request in requests:
                a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
                b = pb_utils.get_input_tensor_by_name(request, "B").as_numpy()
                responses.append(
                    pb_utils.InferenceResponse([pb_utils.Tensor("SUM", a + b), pb_utils.Tensor("DIFF", a - b)])
                )
            return responses
"""

ADD_SUB_CONFIG = """
    input { name: "A" data_type: TYPE_INT32 dims: 3 } input { name: "B" data_type: TYPE_INT32 dims: 3 }
    output { name: "SUM" data_type: TYPE_INT32 dims: 3 } output { name: "DIFF" data_type: TYPE_INT32 dims: 3 }
"""


async def test_requests_of_a_batch_get_their_own_answers_in_order(load: Load) -> None:
    instance = await load(ADD_SUB, ADD_SUB_CONFIG)
    assert isinstance(instance, RequestInstance)
    a, b = np.array([[1, 2, 3]], np.int32), np.array([[10, 20, 30]], np.int32)
    batch = [request(Tensor.of("A", a * n), Tensor.of("B", b)) for n in (1, 2, 3)]
    answers = await instance.execute_requests(batch)
    for n, answer in zip((1, 2, 3), answers, strict=True):
        assert [tensor.name for tensor in answer.outputs] == ["SUM", "DIFF"]
        assert answer.outputs[0].array().tolist() == (a * n + b).tolist()
        assert answer.outputs[1].array().tolist() == (a * n - b).tolist()


async def test_only_requested_outputs_are_sent(load: Load) -> None:
    instance = await load(ADD_SUB, ADD_SUB_CONFIG)
    tensors = [Tensor.of(name, np.ones((1, 3), np.int32)) for name in "AB"]
    (answer,) = await instance.execute_requests([request(*tensors, outputs=("DIFF",))])
    assert [tensor.name for tensor in answer.outputs] == ["DIFF"]


@pytest.mark.parametrize(
    "array",
    [
        np.array([[b"a", b"", b"\x00\xff", "käse".encode()]], dtype=np.object_),
        np.zeros((2, 0), np.float32),
        np.array([[True, False]]),
        np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.array([[1.5, -2]], np.float16),
        np.array([[1.5, -2, 3e38]], ml_dtypes.bfloat16),
        np.array([[2**64 - 1]], np.uint64),
        np.array([[-(2**63)]], np.int64),
    ],
    ids=lambda array: f"{array.dtype}",
)
async def test_every_kind_of_tensor_comes_back_equal(load: Load, array: np.ndarray) -> None:
    instance = await load(ECHO)
    (answer,) = await instance.execute_requests([request(Tensor.of("IN", array))])
    (tensor,) = answer.outputs
    assert tensor.datatype is Tensor.of("IN", array).datatype
    assert tensor.shape == array.shape
    assert tensor.array().tolist() == array.tolist()


async def test_a_model_sees_the_facts_of_its_requests(load: Load) -> None:
    instance = await load("""
        import json

        class TritonPythonModel:
            def execute(self, requests):
                responses = []
                for r in requests:
                    facts = [r.request_id(), r.correlation_id(), sorted(r.requested_output_names()), r.flags(),
                             r.timeout(), json.loads(r.parameters()), r.is_cancelled(), r.inputs()[0].shape(),
                             r.inputs()[0].triton_dtype(), r.inputs()[0].is_cpu(), r.trace().get_context()]
                    text = np.array([json.dumps(facts)], dtype=np.object_)
                    responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)], parameters={"k": 1}))
                return responses
    """)
    plain = request(numbers(1))
    full = request(
        numbers(1), id="x", correlation_id="s1", outputs=("OUT",), parameters={"p": 2}, timeout_us=7, flags=3
    )
    answers = await instance.execute_requests([plain, full])
    facts = [json.loads(answer.outputs[0].array()[0]) for answer in answers]
    assert facts[0] == ["", 0, ["OUT"], 0, 0, {}, False, [1, 1], 11, True, None]
    assert facts[1] == ["x", "s1", ["OUT"], 3, 7, {"p": 2}, False, [1, 1], 11, True, None]
    assert answers[0].parameters == {"k": 1}


async def test_large_tensors_both_ways_at_once(load: Load) -> None:
    instance = await load(ECHO)
    array = np.arange(5_000_000, dtype=np.float32)[None]
    batch = [request(Tensor.of("IN", array + n)) for n in range(3)]
    calls = await asyncio.gather(instance.execute_requests(batch[:2]), instance.execute_requests(batch[2:]))
    answers = [*calls[0], *calls[1]]
    for n, answer in enumerate(answers):
        np.testing.assert_array_equal(answer.outputs[0].array(), array + n)


async def test_an_error_of_one_request_leaves_the_others_alone(load: Load) -> None:
    instance = await load("""
        class TritonPythonModel:
            def execute(self, requests):
                ok = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones(1, np.float32))])
                bad = pb_utils.InferenceResponse(
                    [pb_utils.Tensor("OUT", np.ones(1, np.float32))],
                    error=pb_utils.TritonError("no such row", pb_utils.TritonError.NOT_FOUND),
                )
                plain = pb_utils.InferenceResponse(error=pb_utils.TritonError("broken"))
                return [ok, bad, plain]
    """)
    ok, bad, plain = await instance.execute_requests([request(numbers(1))] * 3)
    assert ok.error is None
    assert ok.outputs[0].array().tolist() == [1]
    assert (error_of(bad).code, error_of(bad).message, bad.outputs) == (ErrorCode.NOT_FOUND, "no such row", [])
    assert (error_of(plain).code, error_of(plain).message) == (ErrorCode.INTERNAL, "broken")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("parameters={'k': 1 << 64}", "response parameter 'k' is an int out of range: it may be from -92233720368547"),
        ("parameters={'k': chr(0xD800)}", "response parameter 'k' is no Unicode text"),
        ("error=pb_utils.TritonError('no ' + chr(0xDCFF))", "no \\udcff"),
    ],
)
async def test_a_response_that_cannot_be_sent_leaves_the_others_alone(load: Load, given: str, text: str) -> None:
    instance = await load(f"""
        class TritonPythonModel:
            def execute(self, requests):
                def tensors():
                    return [pb_utils.Tensor("OUT", np.ones(1, np.float32))]
                ok = pb_utils.InferenceResponse(tensors(), parameters={{"k": -1 << 63, "l": (1 << 64) - 1}})
                return [ok, pb_utils.InferenceResponse(tensors(), {given})]
    """)
    ok, bad = await instance.execute_requests([request(numbers(1))] * 2)
    assert ok.parameters == {"k": -1 << 63, "l": (1 << 64) - 1}
    assert text in error_of(bad).message
    assert error_of(bad).code is ErrorCode.INTERNAL


async def test_an_exception_fails_the_batch_with_its_place(load: Load, tmp_path: Path) -> None:
    instance = await load("""
        class TritonPythonModel:
            def execute(self, requests):
                return self.helper()
            def helper(self):
                raise ValueError("bad value")
    """)
    answers = await instance.execute_requests([request(numbers(1))] * 2)
    path = tmp_path / "m" / "1" / "model.py"
    expected = (
        "Failed to process the request(s) for model 'm_0_0', message: ValueError: bad value\n\nAt:\n"
        f"  {path}(8): helper\n  {path}(6): execute\n"
    )
    for answer in answers:
        assert error_of(answer).code is ErrorCode.INTERNAL
        assert error_of(answer).message == expected
    (again,) = await instance.execute_requests([request(numbers(1))])
    assert error_of(again).message == expected


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (
            "[]",
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:2, and InferenceResponse(s) size is:0\n",
        ),
        ("None", "Expected a list in the execute return, found type '<class 'NoneType'>'."),
        (
            "[1, 2]",
            "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'int'>'.",
        ),
        (
            "[r.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE) or 1 for r in requests]",
            "Expected a None object in the execute function return list for reschduled request, found type "
            "'<class 'int'>'.",
        ),
    ],
)
async def test_wrong_returns_fail_the_batch(load: Load, returned: str, text: str) -> None:
    instance = await load(f"""
        class TritonPythonModel:
            def execute(self, requests):
                return {returned}
    """)
    answers = await instance.execute_requests([request(numbers(1))] * 2)
    expected = f"Failed to process the request(s) for model 'm_0_0', message: {text}"
    assert [error_of(answer).message for answer in answers] == [expected] * 2


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("sys.exit(3)", "SystemExit: 3\n\nAt:"),
        ("raise ValueError", "message: ValueError: <EMPTY MESSAGE>\n\nAt:"),
        ("raise OSError(b'no \\xff'.decode(errors='surrogateescape'))", "OSError: no \\udcff\n\nAt:"),
        ("pb_utils.InferenceResponse([None])", "Output tensor for inference response should not be empty."),
        ("pb_utils.Tensor('', np.ones(1))", "Tensor name cannot be an empty string."),
        (
            "pb_utils.InferenceRequest('x', 0, [], ['y'], 'm').get_response_sender()",
            "Response sender has no reference to the decoupled state of the model.",
        ),
        ("pb_utils.InferenceRequest(inputs=[], model_name='m')", "TypeError: an InferenceRequest needs 'requested"),
        (
            "pb_utils.MetricFamily('a b', '', pb_utils.MetricFamily.GAUGE)",
            "Error when creating MetricFamily: Failed to process the request for model 'm_0_0', message: Invalid",
        ),
    ],
)
async def test_what_goes_wrong_in_execute_is_told(load: Load, statement: str, text: str) -> None:
    instance = await load(f"""
        import sys

        class TritonPythonModel:
            def execute(self, requests):
                {statement}
    """)
    (answer,) = await instance.execute_requests([request(numbers(1))])
    assert text in error_of(answer).message


async def test_execute_may_be_a_coroutine(load: Load) -> None:
    instance = await load("""
        import asyncio

        class TritonPythonModel:
            seen = None

            async def execute(self, requests):
                if requests[0].request_id() == "end":
                    raise SystemExit(3)
                if self.seen is None:
                    self.seen = asyncio.Queue()
                    self.task = asyncio.get_running_loop().create_task(self.count())
                await asyncio.sleep(0)
                number = await self.seen.get()
                out = pb_utils.Tensor("OUT", np.full(1, number, np.float32))
                return [pb_utils.InferenceResponse([out]) for _ in requests]

            async def count(self):
                for number in range(1000):
                    self.seen.put_nowait(number)
                    await asyncio.sleep(0)
    """)
    # one event loop serves all of them, so that a task of the first goes on
    for number in range(2):
        (answer,) = await instance.execute_requests([request(numbers(1))])
        assert answer.outputs[0].array().tolist() == [number]
    (answer,) = await instance.execute_requests([request(numbers(1), id="end")])
    assert "SystemExit: 3" in error_of(answer).message
    (answer,) = await instance.execute_requests([request(numbers(1))])
    assert answer.outputs[0].array().tolist() == [2]
