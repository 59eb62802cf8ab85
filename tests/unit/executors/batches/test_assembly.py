"""Joining requests into batch arrays and cutting results apart into response records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from charonia.datatypes import DataType
from charonia.errors import InternalError, InvalidArgument
from charonia.inference import RECEIPT
from charonia.models.interface import ModelInterface, TensorSpec
from charonia.tensors import Tensor
from charonia.wire import RequestRecord, pack_request, request_meta, unpack_request, unpack_response
from executors.batches.answers import pack_answers, request_outputs
from executors.batches.assembly import Planner, Workspace, groups, join, request_inputs, wanted_outputs
from executors.batches.execution import model_request


def interface(
    inputs: list[TensorSpec], outputs: list[TensorSpec], max_batch_size: int = 8, name: str = "m", backend: str = "test"
) -> ModelInterface:
    return ModelInterface(
        name=name,
        backend=backend,
        platform="",
        max_batch_size=max_batch_size,
        inputs={spec.name: spec for spec in inputs},
        outputs={spec.name: spec for spec in outputs},
        required_inputs=frozenset(spec.name for spec in inputs if not spec.optional),
    )


def record(*tensors: Tensor, rows: int = 1, outputs: tuple[str, ...] = (), pad: int = 0) -> RequestRecord:
    packed = pack_request(
        bytes(16),
        b"e" * (pad + 1),
        b"",
        request_meta(1, "h", tensors, outputs, {}),
        [t.data for t in tensors],
        rows=rows,
        signature=0,
        level=0,
        accepted_ns=0,
    )
    return unpack_request(packed)


def cut(model: ModelInterface, run: list, results: dict[str, np.ndarray]) -> list[list[Tensor]]:
    """The answers as a gateway decodes them."""
    responses = [unpack_response(packed) for packed in pack_answers(model, 1, run, results)]
    assert [response.id for response in responses] == [r.id for _, r in run]
    assert all((r.model, r.version, r.final, r.error) == (model.name, 1, True, None) for r in responses)
    return [response.outputs for response in responses]


FP32 = TensorSpec("x", DataType.FP32, (4,))
OUT = TensorSpec("y", DataType.FP32, (-1,))


def test_requests_of_several_sizes_become_one_array_and_come_apart_again() -> None:
    model = interface([FP32], [OUT])
    planner = Planner(model)
    parts = [np.arange(n * 4, dtype=np.float32).reshape(n, 4) + 100 * n for n in (1, 3, 2)]
    records = [record(Tensor.of("x", part), rows=len(part)) for part in parts]
    run = [(planner.plan(r), r) for r in records]
    arrays = join(model, run, Workspace())
    assert np.array_equal(arrays["x"], np.concatenate(parts))
    cuts = cut(model, run, {"y": arrays["x"] * 2})
    for part, (tensor,) in zip(parts, cuts, strict=True):
        assert tensor.shape == part.shape
        assert np.array_equal(tensor.array(), part * 2)


def test_tenants_share_a_plan_and_models_see_no_receipt_parameter() -> None:
    tensor = Tensor.of("x", np.zeros((1, 4), np.float32))
    planner = Planner(interface([FP32], [OUT]))
    about: dict[str, Any] = {"rows": 1, "signature": 0, "level": 0, "accepted_ns": 0}
    plans = []
    for tenant, parameters in (("", {}), ("acme", {"k": 1}), ("wind", {"k": 1, RECEIPT: True}), ("", {RECEIPT: False})):
        meta = request_meta(1, "h", [tensor], (), parameters).of_tenant(tenant)
        one = unpack_request(pack_request(bytes(16), b"e", b"", meta, [tensor.data], **about))
        plans.append(planner.plan(one))
        asked = model_request(one, plans[-1], [tensor])
        assert asked.parameters == {name: value for name, value in parameters.items() if name != RECEIPT}
        assert one.meta.parameters == parameters
    assert all(plan is plans[0] for plan in plans)
    other = Tensor.of("x", np.zeros((2, 4), np.float32))
    assert planner.plan(record(other, rows=2)) is not plans[0]
    with pytest.raises(InvalidArgument):
        planner.plan(record(tensor, outputs=("none",)))


def test_inputs_in_another_order_share_a_batch_and_keep_their_own_bytes() -> None:
    model = interface([FP32, TensorSpec("z", DataType.INT8, (2,))], [OUT])
    planner = Planner(model)
    x = [np.full((1, 4), i, np.float32) for i in range(2)]
    z = [np.full((1, 2), i + 10, np.int8) for i in range(2)]
    records = [
        record(Tensor.of("x", x[0]), Tensor.of("z", z[0])),
        record(Tensor.of("z", z[1]), Tensor.of("x", x[1])),
    ]
    run = [(planner.plan(r), r) for r in records]
    assert run[0][0].group == run[1][0].group
    arrays = join(model, run, Workspace())
    assert np.array_equal(arrays["x"], np.concatenate(x))
    assert np.array_equal(arrays["z"], np.concatenate(z))


def test_a_single_request_is_a_view_when_aligned_and_right_when_not() -> None:
    model = interface([FP32], [OUT])
    planner = Planner(model)
    part = np.arange(4, dtype=np.float32).reshape(1, 4)
    views = 0
    for pad in range(4):
        r = record(Tensor.of("x", part), pad=pad)
        array = join(model, [(planner.plan(r), r)], Workspace())["x"]
        assert array.flags.aligned
        assert np.array_equal(array, part)
        views += np.shares_memory(array, np.frombuffer(r.record, np.uint8))
    assert views == 1


def test_bytes_tensors_are_object_arrays_of_bytes_both_ways() -> None:
    model = interface([TensorSpec("s", DataType.BYTES, (-1,))], [TensorSpec("t", DataType.BYTES, (-1,))])
    planner = Planner(model)
    parts = [np.array([[b"a", b"", b"\xff\x00c"]], dtype=np.object_), np.array([[b"1", b"22", b"3"]], dtype=np.object_)]
    run = [(planner.plan(r), r) for r in (record(Tensor.of("s", part)) for part in parts)]
    arrays = join(model, run, Workspace())
    assert arrays["s"].dtype == np.object_
    assert arrays["s"].tolist() == [p.tolist()[0] for p in parts]
    cuts = cut(model, run, {"t": arrays["s"]})
    assert [c[0].array().tolist() for c in cuts] == [p.tolist() for p in parts]


def test_bf16_and_fp16_keep_their_bits() -> None:
    for datatype in (DataType.BF16, DataType.FP16, DataType.BOOL):
        spec = TensorSpec("x", datatype, (3,))
        model = interface([spec], [TensorSpec("y", datatype, (3,))])
        planner = Planner(model)
        parts = [np.array([[1, 0, i]]).astype(datatype.numpy) for i in range(2)]
        run = [(planner.plan(r), r) for r in (record(Tensor.of("x", part)) for part in parts)]
        arrays = join(model, run, Workspace())
        assert arrays["x"].dtype == datatype.numpy
        cuts = cut(model, run, {"y": arrays["x"]})
        assert [bytes(c[0].data) for c in cuts] == [bytes(Tensor.of("x", part).data) for part in parts]


def test_reshape_is_applied_for_the_model_and_undone_for_the_client() -> None:
    """I7: variable sizes are matched in order."""
    model = interface(
        [TensorSpec("x", DataType.FP32, (-1, 2, -1), reshape=(2, -1, 1, -1))],
        [TensorSpec("y", DataType.FP32, (1,), reshape=())],
    )
    planner = Planner(model)
    r = record(Tensor.of("x", np.zeros((2, 3, 2, 5), np.float32)), rows=2)
    plan = planner.plan(r)
    assert join(model, [(plan, r)], Workspace())["x"].shape == (2, 2, 3, 1, 5)
    assert request_inputs(model, plan, r)[0].shape == (2, 2, 3, 1, 5)
    (tensor,) = cut(model, [(plan, r)], {"y": np.zeros((2,), np.float32)})[0]
    assert tensor.shape == (2, 1)
    returned = request_outputs(model, plan, [Tensor.of("y", np.ones((2,), np.float32))])
    assert returned[0].shape == (2, 1)


def test_without_batching_a_request_is_a_batch_of_its_own_and_shapes_are_exact() -> None:
    model = interface([TensorSpec("x", DataType.FP32, (-1, 2))], [OUT], max_batch_size=0)
    planner = Planner(model)
    records = [record(Tensor.of("x", np.ones((n, 2), np.float32))) for n in (1, 1, 3)]
    planned = [(i, planner.plan(r)) for i, r in enumerate(records)]
    assert [[i for i, _ in run] for run in groups(model, planned)] == [[0], [1], [2]]
    assert join(model, [(planned[2][1], records[2])], Workspace())["x"].shape == (3, 2)
    (tensor,) = cut(model, [(planned[2][1], records[2])], {"y": np.ones((7,), np.float32)})[0]
    assert tensor.shape == (7,)


def test_requests_that_do_not_fit_together_are_executed_apart() -> None:
    model = interface([TensorSpec("x", DataType.FP32, (-1,))], [OUT], max_batch_size=4)
    planner = Planner(model)
    shapes = [(1, 4), (1, 4), (1, 5), (3, 5), (1, 5)]
    planned = [
        (i, planner.plan(record(Tensor.of("x", np.ones(s, np.float32)), rows=s[0]))) for i, s in enumerate(shapes)
    ]
    assert [[i for i, _ in run] for run in groups(model, planned)] == [[0, 1], [2, 3], [4]]


def test_only_requested_outputs_are_computed_and_sent() -> None:
    """I6."""
    outputs = [TensorSpec(n, DataType.FP32, (-1,)) for n in "abc"]
    model = interface([FP32], outputs)
    planner = Planner(model)
    one = np.ones((1, 4), np.float32)
    records = [record(Tensor.of("x", one), outputs=("c",)), record(Tensor.of("x", one), outputs=("c", "a"))]
    run = [(planner.plan(r), r) for r in records]
    assert wanted_outputs(model, run) == ("a", "c")
    cuts = cut(model, run, {"a": np.ones((2, 1), np.float32), "c": np.zeros((2, 1), np.float32)})
    assert [[t.name for t in c] for c in cuts] == [["c"], ["a", "c"]]  # in the model's order
    everything = record(Tensor.of("x", one))
    assert planner.plan(everything).outputs == ("a", "b", "c")


def test_results_that_are_not_contiguous_are_made_so() -> None:
    model = interface([FP32], [OUT])
    planner = Planner(model)
    part = np.arange(8, dtype=np.float32).reshape(2, 4)
    r = record(Tensor.of("x", part), rows=2)
    (tensor,) = cut(model, [(planner.plan(r), r)], {"y": np.asfortranarray(part)})[0]
    assert np.array_equal(tensor.array(), part)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({}, "did not produce output 'y'"),
        (None, "model 'm' gave a NoneType, not arrays by output name"),
        ([1.0], "model 'm' gave a list, not arrays by output name"),
        ({"y": [[1.0], [2.0]]}, "model 'm' gave a list as output 'y', not an array"),
        ({"y": np.ones((2, 4), np.float64)}, "unexpected datatype TYPE_FP64 for inference output 'y'"),
        ({"y": np.ones((3, 4), np.float32)}, "expecting a batch dimension of 2"),
        ({"y": np.float32(1).reshape(())}, "expecting a batch dimension of 2"),
        ({"y": np.ones((2, 4), np.complex64)}, "complex64"),
    ],
)
def test_a_wrong_result_is_a_typed_error(result: Any, message: str) -> None:
    """Otherwise its rows would be cut at the wrong places."""
    model = interface([FP32], [OUT])
    r = record(Tensor.of("x", np.ones((2, 4), np.float32)), rows=2)
    with pytest.raises(InternalError, match=message):
        cut(model, [(Planner(model).plan(r), r)], result)


@pytest.mark.parametrize(
    ("tensors", "rows", "message"),
    [
        ([Tensor("q", DataType.FP32, (1, 4), bytes(16))], 1, "unexpected inference input 'q' for model 'm'"),
        (
            [Tensor("x", DataType.FP64, (1, 4), bytes(32))],
            1,
            "inference input 'x' data-type is 'FP64', but model 'm' expects 'FP32'",
        ),
        (
            [Tensor("x", DataType.FP32, (1, 5), bytes(20))],
            1,
            r"unexpected shape for input 'x' for model 'm'. Expected \[-1,4\], got \[1,5\]. ",
        ),
        (
            [Tensor("x", DataType.FP32, (1, 4), bytes(12))],
            1,
            "input byte size mismatch for input 'x' for model 'm'. Expected 16, got 12",
        ),
        ([Tensor("x", DataType.FP32, (9, 4), bytes(144))], 9, "inference request batch-size must be <= 8 for 'm'"),
        ([Tensor("x", DataType.FP32, (0, 4), b"")], 0, "inference request batch-size must be <= 8 for 'm'"),
        ([Tensor("x", DataType.FP32, (2, 4), bytes(32))], 1, "1 rows carries 2"),
        ([Tensor("x", DataType.FP32, (), bytes(4))], 1, "input 'x' has no shape but model requires batch dimension"),
        (
            [],
            1,
            r"expected 1 inputs but got 0 inputs for model 'm'. Got input\(s\) \[\], but missing required input\(s\) "
            r"\['x'\]. Please provide all required input\(s\).",
        ),
    ],
)
def test_a_request_that_does_not_fit_the_interface_is_refused(tensors: list[Tensor], rows: int, message: str) -> None:
    planner = Planner(interface([FP32], [OUT]))
    bad = record(*tensors, rows=rows)
    for _ in range(2):  # the second answer comes from the cache
        with pytest.raises(InvalidArgument, match=message):
            planner.plan(bad)


def test_unknown_outputs_are_refused() -> None:
    planner = Planner(interface([FP32], [OUT]))
    with pytest.raises(InvalidArgument, match="unexpected inference output 'n' for model 'm'"):
        planner.plan(record(Tensor.of("x", np.ones((1, 4), np.float32)), outputs=("n",)))


def test_bytes_that_are_no_string_tensor_are_refused() -> None:
    model = interface([TensorSpec("s", DataType.BYTES, (2,))], [OUT])
    planner = Planner(model)
    for data in (b"\x01\x00\x00\x00a", b"\xff\xff\xff\xffa", b"\x00\x00"):
        r = record(Tensor("s", DataType.BYTES, (1, 2), data))
        plan = planner.plan(r)
        with pytest.raises(InvalidArgument):
            join(model, [(plan, r)], Workspace())
        with pytest.raises(InvalidArgument):
            request_inputs(model, plan, r)


def test_a_buffer_is_used_again_and_a_huge_one_is_not_kept() -> None:
    workspace = Workspace()
    first = workspace.flat("x", 100)
    assert np.shares_memory(first, workspace.flat("x", 4000))
    assert first.ctypes.data % 64 == 0
    huge = workspace.flat("x", 65 * 1024 * 1024)
    assert not np.shares_memory(huge, workspace.flat("x", 100))


def test_what_a_model_answers_to_one_request_keeps_its_type_and_shape() -> None:
    """I5: as long as its bytes are of that shape, and a configured reshape can be undone (I7)."""
    reshaped = TensorSpec("t", DataType.INT32, (-1,), reshape=(-1, 1))
    model = interface([FP32], [OUT, reshaped])
    r = record(Tensor.of("x", np.ones((2, 4), np.float32)), rows=2)
    plan = Planner(model).plan(r)
    good = Tensor.of("y", np.ones((2, 3), np.float32))
    assert [t.name for t in request_outputs(model, plan, [Tensor.of("extra", np.ones(1)), good])] == ["y"]
    for odd in (np.ones((2, 3), np.int32), np.ones((1, 3), np.float32), np.array([]), np.float32(1).reshape(())):
        (tensor,) = request_outputs(model, plan, [Tensor.of("y", odd)])
        assert (tensor.datatype, tensor.shape) == (DataType.of_numpy(odd.dtype), odd.shape)
    (tensor,) = request_outputs(model, plan, [Tensor.of("t", np.ones((3, 5, 1), np.int32))])
    assert tensor.shape == (3, 5)
    for bad in (Tensor("y", DataType.FP32, (2, 3), bytes(5)), Tensor.of("t", np.ones((3, 5, 2), np.int32))):
        with pytest.raises(InternalError):
            request_outputs(model, plan, [bad])


def test_outputs_come_in_the_models_order_whatever_the_requests() -> None:
    """I6: by name for backends whose counterparts at Triton keep their outputs sorted."""
    asked = record(Tensor.of("x", np.ones((1, 4), np.float32)), outputs=("a", "c"))
    everything = record(Tensor.of("x", np.ones((1, 4), np.float32)))
    outputs = [TensorSpec(n, DataType.FP32, (-1,)) for n in "cba"]
    for backend, wanted, all_of_them in (("onnxruntime", "ac", "abc"), ("openvino", "ca", "cba")):
        planner = Planner(interface([FP32], outputs, backend=backend))
        assert planner.plan(asked).outputs == tuple(wanted)
        assert planner.plan(everything).outputs == tuple(all_of_them)
