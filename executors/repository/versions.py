"""Which versions of a model are served: version-directory names and the version policy (interface items C3, R1, R3)."""

from __future__ import annotations

from collections.abc import Iterable

from charonia.models.config_errors import InstanceError
from protos.model_config_pb2 import ModelVersionPolicy

# Versions travel as signed 64-bit integers; a directory beyond that cannot be asked for.
_MAX_VERSION = 2**63 - 1


def version_of(directory_name: str) -> int | None:
    """The version a directory name stands for: ASCII digits, above 0, no leading zero; `None` for any other name."""
    if not (directory_name.isascii() and directory_name.isdigit()) or directory_name.startswith("0"):
        return None
    if len(directory_name) > len(str(_MAX_VERSION)):
        return None
    version = int(directory_name)
    return version if version <= _MAX_VERSION else None


def select(policy: ModelVersionPolicy, available: Iterable[int], model_name: str) -> list[int]:
    """The versions to serve, ascending, out of those that exist. An unset policy is the latest one (item C3).

    Raises `InstanceError` when none is left.
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
