"""A model's rules for caching its responses (K1, C24), beyond `response_cache { enable: true }`. Parameters:

    charonia.cache_inputs            comma-separated inputs that determine the answer; default all
    charonia.cache_ttl_s             how long an answer may be reused, in seconds
    charonia.cache_share_tenants     "true": tenants share answers

Invalid values keep the model from loading: a key of the wrong inputs would return wrong answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protos.model_config_pb2 import ModelConfig

from .config_errors import InstanceError

INPUTS = "charonia.cache_inputs"
TTL = "charonia.cache_ttl_s"
SHARED = "charonia.cache_share_tenants"

LONGEST_TTL_S = 86_400
"""Also the default of `charonia.cache_ttl_s`: entries that no request can match any more must expire."""


@dataclass(frozen=True, slots=True)
class CachingRules:
    """`inputs` None stands for all. `ttl_s` is 1..LONGEST_TTL_S."""

    inputs: frozenset[str] | None = None
    ttl_s: int = LONGEST_TTL_S
    shared: bool = False


def caching_rules(config: ModelConfig) -> CachingRules | None:
    """The rules of a model with caching, None for others. Raises `InstanceError`."""
    if not config.response_cache.enable:
        return None
    parameters = {name: config.parameters[name].string_value for name in config.parameters}
    return CachingRules(_inputs(config, parameters), _ttl_s(parameters), _shared(parameters))


def _inputs(config: ModelConfig, parameters: Mapping[str, str]) -> frozenset[str] | None:
    text = parameters.get(INPUTS)
    if text is None:
        return None
    names = frozenset(name.strip() for name in text.split(","))
    for name in sorted(names - {item.name for item in config.input}):
        raise InstanceError(f"parameter '{INPUTS}' names '{name}', which is no input of the model")
    return names


def _ttl_s(parameters: Mapping[str, str]) -> int:
    text = parameters.get(TTL)
    if text is None:
        return LONGEST_TTL_S
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= LONGEST_TTL_S):
        raise InstanceError(f"parameter '{TTL}' must be a whole number between 1 and {LONGEST_TTL_S}, got '{text}'")
    return int(text)


def _shared(parameters: Mapping[str, str]) -> bool:
    text = parameters.get(SHARED, "false").lower()
    if text not in ("true", "false"):
        raise InstanceError(f"parameter '{SHARED}' must be true or false, got '{text}'")
    return text == "true"
