"""Autofill, checks and the choice of profiles, over what a fake of the library says of its plans."""

from __future__ import annotations

import json
from typing import Any

import fake_tensorrt
import pytest

from charonia.errors import InvalidArgument, Unsupported
from charonia.models.config_errors import InstanceError
from charonia.models.config_forms import parse
from executors.backends.tensorrt.engine_tensors import (
    EngineTensors,
    Profile,
    Range,
    check_config,
    closest_profile,
    completed,
    profile_indices,
    read_tensors,
)
from protos import model_config_pb2 as pb


def tensors(plan: bytes) -> EngineTensors:
    return read_tensors(fake_tensorrt, fake_tensorrt.ICudaEngine(json.loads(plan), fake_tensorrt.ILogger()), "m")


def changed(plan: bytes, **fields: Any) -> bytes:
    """The plan with these fields in the tensor a."""
    read = json.loads(plan)
    read["tensors"][0].update(fields)
    return json.dumps(read).encode()


def config(text: str = "") -> pb.ModelConfig:
    return parse(f"name: 'm' platform: 'tensorrt_plan' {text}")


TWO = fake_tensorrt.add_plan(profiles=[((1, 4), (2, 4), (4, 4)), ((4, 4), (16, 4), (32, 4))])


def test_a_plan_gives_tensors_and_the_largest_batch() -> None:
    done = completed(config(), tensors(fake_tensorrt.add_plan()))
    assert done.max_batch_size == 8
    assert done.HasField("dynamic_batching")
    found = [(item.name, item.data_type, list(item.dims)) for item in (*done.input, *done.output)]
    assert found == [(name, pb.TYPE_FP32, [4]) for name in "abc"]


@pytest.mark.parametrize(("profiles", "rows"), [("", 4), ("profile: '1'", 32), ("profile: ['0', '1']", 32)])
def test_the_largest_batch_is_that_of_the_profiles_in_use(profiles: str, rows: int) -> None:
    done = completed(config(f"instance_group {{ {profiles} }}"), tensors(TWO))
    assert done.max_batch_size == rows


def test_a_batch_that_no_profile_takes_is_refused() -> None:
    written = config("max_batch_size: 5 input { name: 'a' data_type: TYPE_FP32 dims: 4 }")
    whole = completed(written, tensors(fake_tensorrt.add_plan()))
    text = "configuration specified max-batch 5 but TensorRT engine only supports max-batch 4"
    with pytest.raises(InstanceError, match=f"^autofill failed for model 'm': {text}$"):
        completed(written, tensors(TWO))
    with pytest.raises(InstanceError, match=text):
        check_config(whole, tensors(TWO))


def test_dims_that_are_written_in_full_mean_no_batching() -> None:
    done = completed(config("input { name: 'a' dims: [-1, 4] }"), tensors(fake_tensorrt.add_plan()))
    assert (done.max_batch_size, list(done.input[1].dims)) == (0, [-1, 4])


@pytest.mark.parametrize(("name", "sentence"), [("2", "invalid profile 2 . Number of profiles"), ("x", "parse 'x'")])
def test_profiles_that_there_are_not(name: str, sentence: str) -> None:
    with pytest.raises(InstanceError, match=sentence):
        profile_indices([name], 2, "m")


def test_profiles_are_named_once_each_and_the_first_is_the_default() -> None:
    assert profile_indices([], 3, "m") == [0]
    assert profile_indices(["2", "0", "2"], 3, "m") == [2, 0]


class TestTheChoiceOfProfiles:
    profiles = (
        Profile(0, {"a": Range((1, 8), (1, 8), (8, 64))}, {"s": Range((1,), (2,), (4,))}),
        Profile(1, {"a": Range((1, 8), (8, 32), (32, 64))}, {"s": Range((1,), (4,), (4,))}),
    )

    @pytest.mark.parametrize(
        ("dims", "values", "index"),
        [
            ((1, 8), (2,), 0),
            ((8, 32), (2,), 1),
            ((16, 8), (2,), 1),
            ((4, 8), (2,), 0),
            ((4, 20), (3,), 0),
            ((5, 20), (4,), 1),
        ],
    )
    def test_the_nearest_that_fits(self, dims: tuple[int, ...], values: tuple[int, ...], index: int) -> None:
        assert closest_profile(self.profiles, {"a": dims}, {"s": values}).index == index

    @pytest.mark.parametrize(
        ("dims", "values", "reason"),
        [
            ((33, 8), (2,), "model expected the shape of dimension 0 to be between 1 and 8 but received 33"),
            ((1, 8, 1), (2,), "model expected 2 dimensions but received 3 dimensions"),
            ((1, 8), (5,), "model expected the shape value 0 to be between 1 and 4 but received 5"),
        ],
    )
    def test_shapes_that_none_takes(self, dims: tuple[int, ...], values: tuple[int, ...], reason: str) -> None:
        with pytest.raises(InvalidArgument) as caught:
            closest_profile(self.profiles, {"a": dims}, {"s": values})
        assert f"{reason} (in profile 0, and 1 others fit as little)" in str(caught.value)


class TestShapeTensors:
    def test_they_are_completed_and_marked(self) -> None:
        done = completed(config(), tensors(fake_tensorrt.fill_plan()))
        assert done.max_batch_size == 0
        assert [(i.name, list(i.dims), i.is_shape_tensor) for i in done.input] == [("x", [1], False), ("s", [2], True)]
        assert [(o.name, list(o.dims), o.is_shape_tensor) for o in done.output] == [
            ("y", [-1, -1], False),
            ("twice", [2], True),
        ]

    def test_a_plan_whose_other_tensors_could_batch_does_not(self) -> None:
        plan = json.loads(fake_tensorrt.fill_plan())
        for tensor in plan["tensors"]:
            if not tensor.get("shape"):
                tensor["dims"][0] = -1
        done = completed(config(), tensors(json.dumps(plan).encode()))
        assert (done.max_batch_size, list(done.input[0].dims)) == (0, [-1])

    def test_they_do_not_batch(self) -> None:
        with pytest.raises(Unsupported, match="max_batch_size 2: requests with different shape values cannot share"):
            completed(config("max_batch_size: 2"), tensors(fake_tensorrt.fill_plan()))

    def test_a_mark_that_is_missing_or_wrong(self) -> None:
        done = completed(config(), tensors(fake_tensorrt.fill_plan()))
        check_config(done, tensors(fake_tensorrt.fill_plan()))
        done.input[1].is_shape_tensor = False
        with pytest.raises(
            InstanceError, match="input 's' for model 'm' is a shape tensor but the model configuration"
        ):
            check_config(done, tensors(fake_tensorrt.fill_plan()))
        done.input[1].is_shape_tensor = done.input[0].is_shape_tensor = True
        with pytest.raises(InstanceError, match="input 'x' for model 'm' is incorrectly marked as a shape tensor"):
            check_config(done, tensors(fake_tensorrt.fill_plan()))

    def test_a_datatype_that_contradicts(self) -> None:
        text = "input { name: 's' data_type: TYPE_INT32 } input { name: 'x' }"
        with pytest.raises(
            InstanceError, match="expects datatype TYPE_INT32 for shape tensor 's', model provides TYPE_INT64"
        ):
            completed(config(text), tensors(fake_tensorrt.fill_plan()))


class TestFormats:
    plan = changed(fake_tensorrt.add_plan((-1, 32, 2, 2)), format="CHW32")

    def test_one_without_padding_is_completed_and_marked(self) -> None:
        done = completed(config(), tensors(self.plan))
        assert [item.is_non_linear_format_io for item in (*done.input, *done.output)] == [True, False, False]
        check_config(done, tensors(self.plan))
        done.input[0].is_non_linear_format_io = False
        with pytest.raises(InstanceError, match="input 'a' for model 'm' uses a non-linear IO format, but"):
            check_config(done, tensors(self.plan))

    def test_one_that_pads_is_refused(self) -> None:
        plan = changed(fake_tensorrt.add_plan((-1, 3, 2, 2)), format="CHW32")
        with pytest.raises(
            Unsupported, match="format CHW32 of tensor 'a' pads its dimension 1 of 3 to a multiple of 32"
        ):
            tensors(plan)


def test_a_datatype_that_requests_cannot_carry() -> None:
    with pytest.raises(Unsupported, match="tensor 'a' has the datatype FP8, which requests cannot carry"):
        tensors(changed(fake_tensorrt.add_plan(), dtype="FP8"))
