"""Selects the versions of a model to serve: names of version directories, and the version policy (C3, R1, R3)."""

from __future__ import annotations

from collections.abc import Iterable

from charonia.models.config_errors import InstanceError
from protos.model_config_pb2 import ModelVersionPolicy

# versions are signed 64-bit integers in the protocol: clients cannot name larger ones
_MAX_VERSION = 2**63 - 1


def version_of(directory_name: str) -> int | None:
    """The version of a directory name: ASCII digits, above 0, no leading zero; None for any other name."""
    if not (directory_name.isascii() and directory_name.isdigit()) or directory_name.startswith("0"):
        return None
    if len(directory_name) > len(str(_MAX_VERSION)):
        return None
    version = int(directory_name)
    return version if version <= _MAX_VERSION else None


def select(policy: ModelVersionPolicy, available: Iterable[int], model_name: str) -> list[int]:
    """Return the existing versions that the policy selects, ascending. An unset policy selects the latest (C3).

    Raises `InstanceError` when it selects none.
    """
    existing = sorted(set(available))
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        chosen = existing
    elif choice == "specific":
        wanted = set(policy.specific.versions)
        chosen = [version for version in existing if version in wanted]
    else:
        chosen = existing[-max(1, policy.latest.num_versions) :]
    if not chosen:
        raise InstanceError(f"at least one version must be available under the version policy of model '{model_name}'")
    return chosen
