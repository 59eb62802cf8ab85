"""`charonia.prefix_routing`: whether requests of a model that generates text go where their prompts were computed, and
tenants share it by tokens. Without it such a model is scheduled like any other.

The default is yes for resumable models, as those of the backends `llm` and `vllm`: they have an engine that remembers
prompts and takes a request before others have ended. Any other model may run one request after the other, which would
then wait for one executor beside idle ones.
"""

from __future__ import annotations

from protos.model_config_pb2 import ModelConfig

from .config_errors import InstanceError
from .interface import ModelInterface

PREFIX_ROUTING = "charonia.prefix_routing"

_YES, _NO = ("true", "1", "yes"), ("false", "0", "no")


def is_routed(interface: ModelInterface) -> bool:
    """Whether a model's requests are placed by their prompts. Answers in the order of requests leave no choice (S6)."""
    block = interface.dynamic_batching
    ordered = block is not None and block.preserve_ordering
    said = interface.parameters.get(PREFIX_ROUTING, "").strip().lower()
    wanted = interface.resumable if not said else said not in _NO
    return wanted and interface.generates_text and interface.sequence_batching is None and not ordered


def check_text_routing(config: ModelConfig) -> None:
    """Raises `InstanceError` for a value other than yes or no."""
    text = config.parameters[PREFIX_ROUTING].string_value if PREFIX_ROUTING in config.parameters else ""
    if text.strip().lower() not in ("", *_YES, *_NO):
        raise InstanceError(f"parameter '{PREFIX_ROUTING}' must be true or false, got '{text}'")
