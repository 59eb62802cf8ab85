"""Reads the executors' options with a grammar of their own: rate limits (Q1), host policies (C11) and agents (R43)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from charonia.errors import StartupError

from .settings import EVERY_DEVICE

_SETTINGS = ("numa-node", "cpu-cores")


def rate_limited(mode: str) -> bool:
    """`--rate-limit`. Raises `StartupError`."""
    if mode not in ("off", "execution_count"):
        raise StartupError(f"--rate-limit must be execution_count or off, got '{mode}'")
    return mode == "execution_count"


def rate_limits(entries: Iterable[str]) -> dict[tuple[int, str], int]:
    """`--rate-limit-resource` as (device, name) -> count. Raises `StartupError`."""
    limits: dict[tuple[int, str], int] = {}
    for entry in entries:
        name, _, rest = entry.partition(":")
        numbers = rest.split(":")
        if not name or len(numbers) > 2 or not all(number.isascii() and number.isdecimal() for number in numbers):
            raise StartupError(
                "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
                f"'<resource_name>:<count>'. Got {entry}"
            )
        device = int(numbers[1]) if len(numbers) == 2 else EVERY_DEVICE
        limits[(device, name)] = int(numbers[0])
    return limits


def repository_agents(directory: str) -> str:
    """`--repoagent-directory`, which must be one when it is given. Raises `StartupError`."""
    if directory and not Path(directory).is_dir():
        raise StartupError(f"--repoagent-directory '{directory}' does not exist or is not a directory")
    return directory


def check_device_pools(option: str, entries: Iterable[str]) -> None:
    """`<gpu>:<bytes>` of options that have no effect here. Raises `StartupError`."""
    for entry in entries:
        device, colon, count = entry.partition(":")
        if not colon or not all(word.isascii() and word.isdecimal() for word in (device, count)):
            raise StartupError(f"--{option} option format is '<GPU device id>:<byte size>'. Got {entry}")


def host_policies(entries: Iterable[str]) -> dict[str, dict[str, str]]:
    """`--host-policy` as policy -> setting -> value; a repeated setting's last value wins. Raises `StartupError`."""
    policies: dict[str, dict[str, str]] = {}
    for entry in entries:
        policy, comma, rest = entry.partition(",")
        setting, equals, value = rest.partition("=")
        if not comma or not equals or not policy or not setting or not value:
            raise StartupError("--host-policy option format is '<policy_name>,<setting>=<value>'. Got " + entry)
        if setting not in _SETTINGS:
            raise StartupError(
                f"--host-policy setting '{setting}' of policy '{policy}' is not known: it is one of "
                f"{', '.join(_SETTINGS)}"
            )
        policies.setdefault(policy, {})[setting] = value
    return policies
