from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from executors.backends.python import api
from executors.backends.python.api import InferenceRequest, InferenceResponse, Tensor, TritonError, TritonModelException

ONE = Tensor("A", np.ones(1))
TWO = Tensor("B", np.ones(1))


def test_tensors_are_found_by_name() -> None:
    assert api.get_input_tensor_by_name(InferenceRequest(inputs=[ONE, TWO]), "B") is TWO
    assert api.get_input_tensor_by_name(InferenceRequest(inputs=[ONE]), "B") is None
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


@pytest.mark.parametrize("make", [InferenceRequest, InferenceResponse])
@pytest.mark.parametrize("wrong", [[], (), "{}", 0, [("a", 1)]])
def test_parameters_are_a_dict_or_none(make: Any, wrong: object) -> None:
    """An empty one of another type as well."""
    with pytest.raises(TritonModelException) as raised:
        make(parameters=wrong)
    assert str(raised.value) == f"Expect dict, got {type(wrong)}"
    assert make(parameters=None).parameters() == make(parameters={}).parameters() == "{}"


def test_request_parameters_are_checked() -> None:
    given = {"a": 1, "b": "c", "d": True}
    assert json.loads(InferenceRequest(parameters=given).parameters()) == given
    with pytest.raises(TritonModelException, match="Expect parameters values to have type bool/int/str"):
        InferenceRequest(parameters={"a": None})


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
        InferenceRequest("m", ["O"], [None], "i")  # type: ignore[list-item]
    with pytest.raises(TritonModelException, match="Requested output name for request with id"):
        InferenceRequest("m", [""], [], "i")


def test_a_request_of_the_models_own_has_no_sender() -> None:
    request = InferenceRequest("m", ["O"], [ONE], preferred_memory=api.PreferredMemory(api.TRITONSERVER_MEMORY_GPU, 0))
    request.set_release_flags(api.TRITONSERVER_REQUEST_RELEASE_ALL)
    with pytest.raises(TritonModelException, match="Only a request that was given to 'execute'"):
        request.get_response_sender()


def test_a_request_may_be_rescheduled() -> None:
    request = InferenceRequest("m", ["O"], [ONE])
    assert not request.is_rescheduled()
    request.set_release_flags(api.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
    assert request.is_rescheduled()
    with pytest.raises(TritonModelException, match="Invalid release flag 3"):
        request.set_release_flags(3)
