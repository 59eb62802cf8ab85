"""A response in model code (P10): to a request of its batch, or from a model that it called."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import TritonError, TritonModelException
from .tensor import Tensor


class InferenceResponse:
    """The response to one request. With `error`, the tensors are ignored (P10)."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, str | int | bool] | None = None,
    ) -> None:
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error of an InferenceResponse must be a TritonError, found type '{type(error)}'.")
        for tensor in output_tensors:
            if tensor is None:
                raise TritonModelException("Output tensor for inference response should not be empty.")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"output_tensors must be Tensor objects, found type '{type(tensor)}'.")
        self._outputs = list(output_tensors)
        self._error = error
        self.checked_parameters = _checked(parameters) if parameters else {}

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """The parameters as a JSON object text."""
        return parameters_text(self.checked_parameters)


def parameters_text(parameters: Mapping[str, Any]) -> str:
    """The JSON text of parameters; `{}` for none."""
    return json.dumps(dict(parameters), separators=(",", ":")) if parameters else "{}"


def _checked(parameters: Mapping[str, str | int | bool]) -> dict[str, str | int | bool]:
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return dict(parameters)
