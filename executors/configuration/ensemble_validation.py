"""Validates the `ensemble_scheduling` block as far as no other model is needed (C51).

`executors.loading.composition` checks the composing models (C52).
"""

from __future__ import annotations

from charonia.models.config_errors import StructureError
from charonia.models.ensemble import CONDITION
from protos.model_config_pb2 import ModelConfig

from .platforms import ENSEMBLE


def check_ensemble(config: ModelConfig, name: str) -> None:
    """Raise `StructureError` with C51's text for the first broken rule."""
    if (config.platform and config.platform != ENSEMBLE) or config.backend:
        raise StructureError(f"ensemble scheduling cannot be set for model '{name}' whose platform is not '{ENSEMBLE}'")
    if config.instance_group:
        raise StructureError(f"instance group should not be specified for ensemble '{name}'")
    if config.HasField("optimization"):
        raise StructureError(f"optimization should not be specified for ensemble '{name}'")
    if config.model_warmup:
        raise StructureError(f"model_warmup can not be specified for ensemble '{name}'")
    if not config.ensemble_scheduling.step:
        raise StructureError(f"must specify 'step' for ensemble '{name}'")
    _check_graph(config, name)


def _check_graph(config: ModelConfig, name: str) -> None:
    produced: set[str] = set()
    consumed: set[str] = set()
    for index, step in enumerate(config.ensemble_scheduling.step):
        where = f"in step {index} of ensemble '{name}'"
        if not step.model_name:
            raise StructureError(f"must specify 'model_name' {where}")
        if not step.input_map:
            raise StructureError(f"must specify 'input_map' {where}")
        if not step.output_map:
            raise StructureError(f"must specify 'output_map' {where}")
        consumed.update(step.input_map.values())
        for tensor in step.output_map.values():
            if tensor in produced:
                raise StructureError(
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}' "
                    f"step {index}"
                )
            produced.add(tensor)
    consumed.update(v.string_value for k, v in config.parameters.items() if k.startswith(CONDITION))
    inputs = [item.name for item in config.input]
    outputs = [item.name for item in config.output]
    for tensor in inputs:
        if tensor not in consumed:
            raise StructureError(f"ensemble input '{tensor}' for ensemble {name} is not used")
    for tensor in outputs:
        if tensor not in produced:
            raise StructureError(f"ensemble output '{tensor}' for ensemble {name} is not used")
    # every consumed tensor needs a producer, and every produced one a consumer
    dangling = (consumed ^ produced) - set(inputs) - set(outputs)
    for tensor in sorted(dangling):
        raise StructureError(f"ensemble tensor '{tensor}' is unused in ensemble '{name}'")
