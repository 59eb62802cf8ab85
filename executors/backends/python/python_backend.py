"""The entry point of the `python` backend, which the executor calls. `python_instance` does the work."""

from __future__ import annotations

import json

from charonia.backend import InstanceSpec, ModelSource
from charonia.errors import InternalError
from executors.configuration.autocomplete import invalid_result, merge
from protos.model_config_pb2 import ModelConfig

from .custom_metrics import CustomMetrics
from .python_instance import PythonInstance, completed_config, load_instance


class PythonBackend:
    """Makes instances, each with its own process (P1), and renders the metrics of all."""

    name = "python"

    def __init__(self) -> None:
        self._metrics = CustomMetrics()

    def render_metrics(self) -> bytes:
        """Return the models' custom metrics in the text format (P16)."""
        return self._metrics.render()

    async def probe(self, source: ModelSource) -> ModelConfig | None:
        """Return the configuration completed by the model's `auto_complete_config`; None if it has none (P2).

        Raises `InternalError` with what the model raised, conflicts included; `InstanceError` for conflicts that the
        model's process did not detect.
        """
        text = await completed_config(source)
        if text is None:
            return None
        try:
            document = json.loads(text)
        except ValueError as error:
            raise InternalError(f"{invalid_result(source.name)} {error}") from error
        return merge(source.config, document)

    async def create_instance(self, spec: InstanceSpec) -> PythonInstance:
        """Load the model in a new process. Raises a `CharoniaError` whose text is the reason (P3, P12)."""
        return await load_instance(spec, self._metrics)
