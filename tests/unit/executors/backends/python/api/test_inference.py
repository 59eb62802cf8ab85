from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from executors.backends.python import api
from executors.backends.python.api import InferenceRequest, InferenceResponse, Tensor, TritonError, TritonModelException

ONE = Tensor("A", np.ones(1))
TWO = Tensor("B", np.ones(1))


def request(**more: Any) -> InferenceRequest:
    return InferenceRequest(**{"inputs": [], "requested_output_names": ["O"], "model_name": "m", **more})


def test_tensors_are_found_by_name() -> None:
    assert api.get_input_tensor_by_name(request(inputs=[ONE, TWO]), "B") is TWO
    assert api.get_input_tensor_by_name(request(inputs=[ONE]), "B") is None
    assert api.get_output_tensor_by_name(InferenceResponse([ONE, TWO]), "A") is ONE
    assert api.get_output_tensor_by_name(InferenceResponse(), "A") is None


def test_a_response_with_an_error_tells_it() -> None:
    response = InferenceResponse([ONE], TritonError("why", TritonError.CANCELLED))
    assert response.has_error()
    error = response.error()
    assert error is not None
    assert (error.message(), error.code(), str(error)) == ("why", 7, "why")
    assert TritonError("x").code() == TritonError.INTERNAL == 1
    assert TritonError("x", 99).code() == TritonError.UNKNOWN
    assert not InferenceResponse([ONE]).has_error()


@pytest.mark.parametrize("make", [request, InferenceResponse])
@pytest.mark.parametrize("wrong", [[], (), "{}", 0, [("a", 1)]])
def test_parameters_are_a_dict_or_none(make: Any, wrong: object) -> None:
    """An empty one of another type as well."""
    with pytest.raises(TritonModelException) as raised:
        make(parameters=wrong)
    assert str(raised.value) == f"Expect dict, got {type(wrong)}"
    assert make(parameters=None).parameters() == make(parameters={}).parameters() == "{}"


def test_request_parameters_are_checked() -> None:
    given = {"a": 1, "b": "c", "d": True}
    assert json.loads(request(parameters=given).parameters()) == given
    with pytest.raises(TritonModelException, match="Expect parameters values to have type bool/int/str"):
        request(parameters={"a": None})


def test_response_parameters_are_checked() -> None:
    given = {"a": 1, "b": "x", "c": True}
    assert json.loads(InferenceResponse(parameters=given).parameters()) == given
    with pytest.raises(TritonModelException) as raised:
        InferenceResponse(parameters={"a": 1.5})  # type: ignore[dict-item]
    assert raised.value.message() == "Expect parameters values to have type bool/int/str, found type <class 'float'>"
    with pytest.raises(TritonModelException) as raised:
        InferenceResponse(parameters={1: 1})  # type: ignore[dict-item]
    assert raised.value.message() == "Expect parameters keys to have type str, found type <class 'int'>"


def test_what_is_no_tensor_or_error_is_refused() -> None:
    with pytest.raises(TritonModelException, match=r"^Output tensor for inference response should not be empty\.$"):
        InferenceResponse([None])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="must be Tensor objects"):
        InferenceResponse([np.ones(1)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="must be a TritonError"):
        InferenceResponse([], "text")  # type: ignore[arg-type]
    with pytest.raises(
        TritonModelException, match="Input tensor for request with id 'i' and model name 'm' should not"
    ):
        InferenceRequest("i", 0, [None], ["O"], "m")  # type: ignore[list-item]
    with pytest.raises(TritonModelException, match="Requested output name for request with id"):
        InferenceRequest("i", 0, [], [""], "m")


def test_a_request_of_the_models_own_is_checked() -> None:
    """The order of its fields is Triton's, and so is what raises."""
    made = InferenceRequest("i", "c", [ONE], ["B", "A", "B"], "m", 3, 1, 5)
    assert (made.request_id(), made.correlation_id(), made.inputs(), made.flags(), made.timeout()) == (
        *("i", "c", [ONE]),
        *(1, 5),
    )
    assert (made.requested_output_names(), made.outputs) == ({"A", "B"}, ["A", "B"])
    made.requested_output_names().clear()
    assert made.requested_output_names() == {"A", "B"}
    for missing in ("inputs", "requested_output_names", "model_name"):
        with pytest.raises(TypeError, match=missing):
            request(**{missing: None})
    wrong = {
        "inputs": [1],
        "requested_output_names": "AB",
        "model_version": "1",
        "flags": -1,
        "timeout": -1,
        "request_id": 7,
        "correlation_id": -1,
        "preferred_memory": 0,
        "trace": "text",
    }
    for field, value in [*wrong.items(), ("model_version", 1 << 63), ("flags", 1 << 32), ("timeout", 1 << 64)]:
        with pytest.raises(TypeError, match=field):
            request(**{field: value})
    with pytest.raises(TritonModelException, match=r"^Correlation ID must be integer or string$"):
        request(correlation_id=1.5)
    assert request(model_version=-1).model_version() == -1
    for flags in ("1", None, -1):
        with pytest.raises(TypeError, match="flags"):
            made.set_flags(flags)  # type: ignore[arg-type]
    made.set_flags(np.int64(3))  # type: ignore[arg-type]
    assert (made.flags(), type(made.flags())) == (3, int)


def test_names_that_models_use_are_there() -> None:
    assert api.TRITON_STRING_TO_NUMPY["TYPE_BOOL"] is bool
    assert "TYPE_BF16" not in api.TRITON_STRING_TO_NUMPY
    assert api.Logger.LogLevel.WARNING == api.Logger.WARNING


def test_a_request_of_the_models_own_has_no_sender() -> None:
    made = request(preferred_memory=api.PreferredMemory(api.TRITONSERVER_MEMORY_GPU, 0))
    made.set_release_flags(api.TRITONSERVER_REQUEST_RELEASE_ALL)
    with pytest.raises(TritonModelException, match="no reference to the decoupled state of the model"):
        made.get_response_sender()


def test_a_request_may_be_rescheduled() -> None:
    made = request()
    assert not made.is_rescheduled()
    made.set_release_flags(api.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
    assert made.is_rescheduled()
    with pytest.raises(TritonModelException, match="Invalid release flag 3"):
        made.set_release_flags(3)
