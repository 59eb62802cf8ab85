"""Which requests of a model are recorded with their tensors, for `charonia replay` (ADR 0060). Parameters:

    charonia.record_share      the share of requests, above 0 and at most 1; without it nothing is recorded
    charonia.record_days       how long a recording is kept, at most 90; default 7
    charonia.record_bytes      bytes of recordings that the model keeps, the oldest go first; default 64 MiB
    charonia.record_tenants    comma-separated tenants that agreed, `*` for all; default none

Requests without a tenant need no agreement. Invalid values keep the model from loading: a tenant's data must not be
kept because of a slip in a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from protos.model_config_pb2 import ModelConfig

from .config_errors import InstanceError

SHARE = "charonia.record_share"
DAYS = "charonia.record_days"
SIZE = "charonia.record_bytes"
TENANTS = "charonia.record_tenants"

MAX_DAYS = 90
DEFAULT_DAYS = 7
DEFAULT_BYTES = 64 << 20
MAX_BYTES = 64 << 30
EVERYONE = "*"

_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class RecordingRules:
    """`share` is above 0 and at most 1; `keep_s` seconds; `limit_bytes` bound all recordings of the model."""

    share: float
    keep_s: int = DEFAULT_DAYS * _DAY_S
    limit_bytes: int = DEFAULT_BYTES
    tenants: frozenset[str] = frozenset()

    def may_record(self, tenant: str) -> bool:
        """Whether requests of a tenant may be recorded, "" for none."""
        return not tenant or tenant in self.tenants or EVERYONE in self.tenants


def recording_rules(config: ModelConfig) -> RecordingRules | None:
    """The rules of a model that records requests, None for others. Raises `InstanceError`."""
    parameters = {name: config.parameters[name].string_value for name in config.parameters}
    known = [name for name in (DAYS, SIZE, TENANTS) if name in parameters]
    if SHARE not in parameters:
        if known:
            raise InstanceError(f"parameter '{known[0]}' needs '{SHARE}', without which nothing is recorded")
        return None
    share = _number(parameters, SHARE, 1.0, 1)
    days = _number(parameters, DAYS, DEFAULT_DAYS, MAX_DAYS)
    names = frozenset(name for text in parameters.get(TENANTS, "").split(",") if (name := text.strip()))
    return RecordingRules(share, max(1, round(days * _DAY_S)), _size_bytes(parameters), names)


def _number(parameters: Mapping[str, str], name: str, default: float, most: int) -> float:
    text = parameters.get(name)
    if text is None:
        return default
    number = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not 0 < number <= most:
        raise InstanceError(f"parameter '{name}' must be a number above 0 and at most {most}, got '{text}'")
    return number


def _size_bytes(parameters: Mapping[str, str]) -> int:
    text = parameters.get(SIZE)
    if text is None:
        return DEFAULT_BYTES
    if not (text.isascii() and text.isdecimal() and len(text) <= 12 and 1 <= int(text) <= MAX_BYTES):
        raise InstanceError(f"parameter '{SIZE}' must be a whole number between 1 and {MAX_BYTES}, got '{text}'")
    return int(text)
