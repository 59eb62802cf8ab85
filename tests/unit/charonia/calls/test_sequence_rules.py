"""What requests of sequences must say (S30, S31, S42), and the marks they get."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from charonia.calls.admission import Admission, sequence_mark
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InvalidArgument, Unsupported
from charonia.inference import InferenceRequest
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from charonia.wire import SequenceMark
from executors.configuration.config import normalise
from protos.model_config_pb2 import ModelConfig

CORRID = 'control_input { name: "C" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_%s } }'


def admission(block: str = "", scheduling: str = "sequence_batching") -> Admission:
    text = (
        'name: "m" backend: "python" max_batch_size: 4 input { name: "X" data_type: TYPE_INT32 dims: 1 } '
        f"{scheduling} {{ {block} }}"
    )
    return Admission(ModelInterface.of(normalise(text_format.Parse(text, ModelConfig()))), 1, "hash")


def request(number: int | str, rows: int = 1, **more: bool) -> InferenceRequest:
    return InferenceRequest(
        "m", 1, [Tensor("X", DataType.INT32, (rows, 1), bytes(4 * rows))], sequence_id=number, **more
    )


@pytest.mark.parametrize(
    ("block", "asked", "text"),
    [
        ("", request(0), "inference request to model 'm' must specify a non-zero or non-empty correlation ID"),
        ("", request(""), "inference request to model 'm' must specify a non-zero or non-empty correlation ID"),
        (
            "",
            request(0, rows=2),
            "inference request to model 'm' must specify batch-size 1 due to requirements of sequence batcher",
        ),
        ("", request("x" * 129), "string correlation ID cannot be longer than 128 characters"),
        ("", request("é" * 65), "string correlation ID cannot be longer than 128 characters"),
        (
            CORRID % "INT32",
            request("a"),
            "sequence batching control 'C' data-type is 'BYTES', but model 'm' expects 'INT32'",
        ),
        (
            CORRID % "STRING",
            request(3),
            "sequence batching control 'C' data-type is 'UINT64', but model 'm' expects 'BYTES'",
        ),
    ],
)
def test_refusals(block: str, asked: InferenceRequest, text: str) -> None:
    gate = admission(block)
    for _ in range(2):  # the second time its signature is known
        with pytest.raises(CharoniaError) as raised:
            gate.admit(asked)
        assert raised.value.message == text
        assert isinstance(raised.value, Unsupported if "longer" in text else InvalidArgument)


def test_what_fits_is_sequential() -> None:
    assert admission().admit(request("x" * 128)).sequential
    assert admission(CORRID % "STRING").admit(request("a")).sequential
    assert admission("iterative_sequence: true").admit(request(0)).sequential
    assert not admission(scheduling="dynamic_batching").admit(request(5)).sequential
    with pytest.raises(Unsupported, match="128 characters"):
        admission(scheduling="dynamic_batching").admit(request("x" * 129))


def test_marks() -> None:
    new = bytes(range(16))
    assert sequence_mark(request(7, sequence_start=True), new, "") == SequenceMark(7, start=True)
    assert sequence_mark(request("a", sequence_end=True), new, "") == SequenceMark("a", end=True)
    assert sequence_mark(request(-1), new, "").correlation_id == 2**64 - 1, "signed on one wire, unsigned on the other"
    made = sequence_mark(request(0), new, "")
    assert (made.start, made.end) == (True, True)
    assert made.correlation_id


def test_tenants_do_not_see_one_anothers_sequences() -> None:
    mine, yours = (sequence_mark(request(7), bytes(16), tenant) for tenant in ("mine", "yours"))
    assert mine.correlation_id == yours.correlation_id == 7
    assert len({mine.key, yours.key, sequence_mark(request(7), bytes(16), "").key}) == 3
    assert SequenceMark.unpack(mine.pack()) == mine
