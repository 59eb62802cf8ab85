"""The gate of a model: texts and their order (I2-I4, T3, T6-T8), and what a checked request carries on."""

from __future__ import annotations

import pytest

from charonia.calls.admission import Admission
from charonia.calls.entry_packer import request_record
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.inference import InferenceRequest
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor, join_bytes_elements
from charonia.wire import unpack_request
from executors.configuration.config import normalise

HINT = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
BATCHING = """
name: "m" backend: "python" max_batch_size: 4
input { name: "a" data_type: TYPE_FP32 dims: 16 }
input { name: "b" data_type: TYPE_STRING dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
output { name: "z" data_type: TYPE_FP32 dims: 1 }
dynamic_batching { priority_levels: 3 default_priority_level: 2 }
"""
PLAIN = """
name: "m" backend: "python"
input { name: "a" data_type: TYPE_FP32 dims: [-1, 2] }
input { name: "o" data_type: TYPE_FP32 dims: 1 optional: true }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""


def admission(config: str) -> Admission:
    return Admission(ModelInterface.of(normalise(parse(config))), 1, "hash")


def a(*shape: int, size: int | None = None) -> Tensor:
    count = 1
    for dim in shape:
        count *= dim
    return Tensor("a", DataType.FP32, shape, bytes(4 * count if size is None else size))


def b(rows: int, *elements: bytes) -> Tensor:
    return Tensor("b", DataType.BYTES, (rows, len(elements) // rows), join_bytes_elements(elements))


def ask(*inputs: Tensor, **fields: object) -> InferenceRequest:
    return InferenceRequest("m", 1, list(inputs), **fields)  # type: ignore[arg-type]


def refusal(config: str, request: InferenceRequest) -> str:
    gate = admission(config)
    with pytest.raises(InvalidArgument) as caught:
        gate.admit(request)
    with pytest.raises(InvalidArgument) as again:
        gate.admit(request)
    assert again.value.message == caught.value.message
    return caught.value.message


def test_what_a_request_carries_on() -> None:
    gate = admission(BATCHING)
    admitted = gate.admit(ask(a(2, 16), b(2, b"x", b"yy"), outputs=("z",), parameters={"p": "v"}))
    assert admitted.rows == 2
    assert admitted.bytes_inputs == ((1, 2),)
    assert (admitted.meta.version, admitted.meta.content_hash, admitted.meta.outputs) == (1, "hash", ("z",))
    assert admitted.meta.parameters == {"p": "v"}
    assert admission(PLAIN).admit(ask(a(3, 2))).rows == 1
    assert admission(PLAIN).admit(ask(a(0, 2))).rows == 1


def test_only_equal_shapes_beyond_the_batch_share_a_signature() -> None:
    gate = admission(BATCHING)
    one = gate.admit(ask(a(1, 16), b(1, b"x"))).signature
    assert gate.admit(ask(b(3, b"x", b"y", b"z"), a(3, 16))).signature == one
    assert gate.admit(ask(a(1, 16), b(1, b"x", b"y"))).signature != one


def test_parameters_that_compare_equal_stay_apart() -> None:
    gate = admission(PLAIN)
    for value in (1, True, 1.0, "1"):
        kept = gate.admit(ask(a(1, 2), parameters={"p": value})).meta.parameters["p"]
        assert (type(kept), kept) == (type(value), value)


def test_large_signatures_are_not_remembered() -> None:
    gate = admission(PLAIN)
    for number in range(5):
        gate.admit(ask(a(1, 2), parameters={"p": str(number) * 5000}))
    assert not gate._known
    gate.admit(ask(a(1, 2)))
    assert len(gate._known) == 1


def test_strings_are_checked_each_time() -> None:
    gate = admission(BATCHING)
    good = b(1, b"abc")
    gate.admit(ask(a(1, 16), good))
    bad = Tensor("b", DataType.BYTES, good.shape, b"\x09\0\0\0abc")
    with pytest.raises(InvalidArgument, match="incomplete string data"):
        gate.admit(ask(a(1, 16), bad))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask(Tensor("q", DataType.FP32, (1,), b""), a(1, 8)), "unexpected inference input 'q' for model 'm'"),
        (ask(a(1, 16), Tensor("q", DataType.FP32, (1,), b"1234")), "unexpected inference input 'q' for model 'm'"),
        (ask(a(1, 16), a(1, 16)), "[request id: <id_unknown>] input 'a' already exists in request"),
        (
            ask(a(1, 16), id="7"),
            "[request id: 7] expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['a'], but missing "
            "required input(s) ['b']. Please provide all required input(s).",
        ),
        (
            ask(Tensor("a", DataType.INT32, (1, 16), bytes(64)), b(1, b"x")),
            "[request id: <id_unknown>] inference input 'a' data-type is 'INT32', but model 'm' expects 'FP32'",
        ),
        (
            ask(a(1, 8), b(1, b"x")),
            "[request id: <id_unknown>] unexpected shape for input 'a' for model 'm'. Expected [-1,16], got [1,8]. "
            + HINT,
        ),
        (
            ask(a(16), b(1, b"x")),
            "[request id: <id_unknown>] input 'a' batch size does not match other inputs for 'm'",
        ),
        (
            ask(Tensor("a", DataType.FP32, (), b"1234"), b(1, b"x")),
            "[request id: <id_unknown>] input 'a' has no shape but model requires batch dimension for 'm'",
        ),
        (
            ask(a(5, 16), b(5, *[b"x"] * 5)),
            "[request id: <id_unknown>] inference request batch-size must be <= 4 for 'm'",
        ),
        (
            ask(a(2, 16), b(1, b"x")),
            "[request id: <id_unknown>] input 'a' batch size does not match other inputs for 'm'",
        ),
        (
            ask(a(1, 16, size=60), b(1, b"x")),
            "[request id: <id_unknown>] input byte size mismatch for input 'a' for model 'm'. Expected 64, got 60",
        ),
        (
            ask(Tensor("a", DataType.FP32, (-1, 16), b""), b(1, b"x")),
            "[request id: <id_unknown>] input 'a' batch size does not match other inputs for 'm'",
        ),
        (
            ask(Tensor("a", DataType.FP32, (-1, 16), b""), Tensor("b", DataType.BYTES, (-1, 1), b"")),
            "[request id: <id_unknown>] inference request batch-size must be <= 4 for 'm'",
        ),
        (
            ask(a(1, 16), Tensor("b", DataType.BYTES, (1, 2), join_bytes_elements([b"x"]))),
            "[request id: <id_unknown>] expected 2 string elements for inference input 'b' for model 'm', got 1",
        ),
        (ask(a(1, 16), b(1, b"x"), outputs=("q",)), "unexpected inference output 'q' for model 'm'"),
        (ask(a(1, 8), b(1, b"x"), outputs=("z", "q", "p")), "unexpected inference output 'p' for model 'm'"),
        (ask(b(1, b"x"), outputs=("z", "z")), "[request id: <id_unknown>] output 'z' already exists in request"),
        (
            ask(a(1, 16), b(1, b"x"), Tensor("q", DataType.FP32, (1,), b"1234")),
            "[request id: <id_unknown>] expected 2 inputs but got 3 inputs for model 'm'. Got input(s) "
            "['a','b','q'], but missing required input(s) []. Please provide all required input(s).",
        ),
        (
            ask(a(9, 8), Tensor("b", DataType.BYTES, (0, 1), b"")),
            "[request id: <id_unknown>] inference request batch-size must be >= 1 for 'm'",
        ),
    ],
)
def test_refusals_of_a_batching_model(request_: InferenceRequest, message: str) -> None:
    assert refusal(BATCHING, request_) == message


TEXTS = """
name: "m" backend: "python"
input { name: "a" data_type: TYPE_STRING dims: 1 }
input { name: "b" data_type: TYPE_STRING dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""


def test_of_several_wrong_inputs_the_last_is_named() -> None:
    """As a map of Triton's hands them out; what concerns all inputs comes before what concerns one."""
    wrong = {name: Tensor(name, DataType.BYTES, (1,), b"\x09\0\0\0ab") for name in "ab"}
    right = {name: Tensor(name, DataType.BYTES, (1,), b"\x02\0\0\0ab") for name in "ab"}
    typed = {name: Tensor(name, DataType.FP32, (1,), b"1234") for name in "ab"}
    gate = admission(TEXTS)
    for _ in range(2):
        for first, second in (("a", "b"), ("b", "a")):
            for inputs in ((wrong[first], wrong[second]), (typed[first], wrong[second])):
                with pytest.raises(InvalidArgument, match=f"incomplete string data for inference input '{second}'"):
                    gate.admit(ask(*inputs))
            with pytest.raises(InvalidArgument, match=f"input '{second}' data-type is 'FP32'"):
                gate.admit(ask(wrong[first], typed[second]))
        gate.admit(ask(*right.values()))  # from now on only strings are checked
        gate.admit(ask(right["b"], right["a"]))
    for elements in ({"a": "a is wrong", "b": "b is wrong"}, {"b": "b is wrong"}):
        with pytest.raises(InvalidArgument, match="b is wrong"):
            gate.admit(ask(right["a"], right["b"], elements=elements))
    many = ask(Tensor("a", DataType.FP32, (2, 16), b""), b(1, b"x"))
    assert "input 'a' batch size does not match other inputs" in refusal(BATCHING, many)


def test_refusals_of_a_plain_model() -> None:
    assert refusal(PLAIN, ask(a(1, 3))) == (
        "[request id: <id_unknown>] unexpected shape for input 'a' for model 'm'. Expected [-1,2], got [1,3]. "
    )
    for shape, text in (
        ((-1, 2), "All input dimensions should be specified for input 'a' for model 'm', got [-1,2]"),
        ((-1, 3), "All input dimensions should be specified for input 'a' for model 'm', got [-1,3]"),
        ((1, -1), "All input dimensions should be specified for input 'a' for model 'm', got [1,-1]"),
        ((-1,), "unexpected shape for input 'a' for model 'm'. Expected [-1,2], got [-1]. "),
        ((2**62, 3), "unexpected shape for input 'a' for model 'm'. Expected [-1,2], got [4611686018427387904,3]. "),
        ((2**62, 2), "byte size for tensor 'a' exceeds maximum size of 9223372036854775807"),
        ((-5, 2), "tensor 'a' contains an invalid dimension [-5,2]"),
    ):
        asked = ask(Tensor("a", DataType.FP32, shape, b""))
        assert refusal(PLAIN, asked) == f"[request id: <id_unknown>] {text}"
    assert refusal(PLAIN, ask(id="é")) == (
        "[request id: é] expected number of inputs between 1 and 2 but got 0 inputs for model 'm'. Got input(s) [], "
        "but missing required input(s) ['a']. Please provide all required input(s)."
    )


def test_levels() -> None:
    gate = admission(BATCHING)
    assert [gate.level(priority) for priority in (0, 1, 3, 4, 2**64 - 1)] == [2, 1, 3, 2, 2]
    assert admission(PLAIN).level(5) == 0


def test_the_record_of_an_ensembles_request_has_its_priority_whatever_that_is() -> None:
    """S52: an ensemble has one queue, and its steps inherit the priority."""
    levels = "backend: 'python' max_batch_size: 1 dynamic_batching { priority_levels: 3 default_priority_level: 2 }"
    kinds = {"platform: 'ensemble' max_batch_size: 1 ensemble_scheduling { }": (0, 2**32), levels: (2, 2)}
    for kind, (level, expected) in kinds.items():
        gate = admission(f'name: "m" input {{ name: "a" data_type: TYPE_FP32 dims: 16 }} {kind}')
        request = ask(a(1, 16), priority=2**32)
        assert gate.level(request.priority) == level
        record = request_record(b"i" * 16, b"e", request, gate.admit(request), level, 0)
        assert unpack_request(record).level == expected
