"""The secrets that webhooks are signed with, read from a file that may change while a sender runs.

The file is either lines of `whsec_...` (all of them sign, for everybody) or TOML:

    default = ["whsec_new", "whsec_old"]
    [tenants]
    acme = "whsec_of_acme"
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from charonia.errors import StartupError

from .signatures import PREFIX, parse_secret

_log = logging.getLogger(__name__)

Secrets = tuple[bytes, ...]


class Keyring:
    """Secrets by tenant. If the file cannot be read any more, the last secrets stay in force."""

    def __init__(self, path: str) -> None:
        """Raises `StartupError` for a file that cannot be used."""
        self._path = Path(path)
        self._default: Secrets = ()
        self._tenants: Mapping[str, Secrets] = {}
        self._seen: object = None
        try:
            self._read()
        except (OSError, ValueError) as error:
            raise StartupError(f"webhook secrets '{path}' cannot be used: {_reason(error)}") from None

    def refresh(self) -> None:
        """Read the file again if it has changed. Blocks for a stat, and for a small read after a change."""
        try:
            if self._identity() != self._seen:
                self._read()
                _log.info("webhook secrets '%s' were read again", self._path)
        except (OSError, ValueError) as error:
            if self._seen != repr(error):
                _log.error("webhook secrets '%s' stay as they were: %s", self._path, _reason(error))
            self._seen = repr(error)

    def secrets_of(self, tenant: str) -> Secrets:
        """The secrets that sign for this tenant, in the order of the file; empty if there are none."""
        return self._tenants.get(tenant, self._default)

    def _identity(self) -> tuple[int, int, int]:
        found = os.stat(self._path)
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _read(self) -> None:
        seen = self._identity()
        self._default, self._tenants = parse_secrets(self._path.read_text())
        self._seen = seen


def parse_secrets(text: str) -> tuple[Secrets, dict[str, Secrets]]:
    """The default secrets, and those by tenant, in a file's text. Raises `ValueError`."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if lines and all(line.startswith(PREFIX) for line in lines):
        return tuple(parse_secret(line) for line in lines), {}
    content = tomllib.loads(text)
    unknown = sorted(set(content) - {"default", "tenants"})
    if unknown:
        raise ValueError(f"unknown entry '{unknown[0]}': there are 'default' and 'tenants'")
    tenants = content.get("tenants", {})
    if not isinstance(tenants, dict):
        raise ValueError("'tenants' must be a table of tenants and their secrets")
    default = _secrets("default", content["default"]) if "default" in content else ()
    parsed = {tenant: _secrets(tenant, value) for tenant, value in tenants.items()}
    if not default and not parsed:
        raise ValueError("it holds no secret")
    return default, parsed


def _secrets(name: str, value: object) -> Secrets:
    entries = value if isinstance(value, list) else [value]
    secrets: list[bytes] = []
    for entry in entries:
        if not isinstance(entry, str):
            raise ValueError(f"'{name}' must be a secret or a list of secrets")
        try:
            secrets.append(parse_secret(entry))
        except ValueError as error:
            raise ValueError(f"'{name}': {error}") from None
    if not secrets:
        raise ValueError(f"'{name}' must be a secret or a list of secrets")
    return tuple(secrets)


def _reason(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
