"""Credentials for remote repositories (R7), from the environment or the file named by TRITON_CLOUD_CREDENTIAL_PATH.

With a file, the environment is ignored, as in Triton: the entry whose key is the longest prefix of the repository's
URL is used. Values never appear in a message or a `repr`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from charonia.errors import StartupError

from .store import AZURE, GCS, S3, RemoteAddress

FILE_VARIABLE = "TRITON_CLOUD_CREDENTIAL_PATH"
_AUTH_TYPES = ("managed_identity", "default")
_FIELDS = {
    S3: frozenset({"secret_key", "key_id", "region", "session_token", "profile"}),
    AZURE: frozenset({"account_str", "account_key"}),
}


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials by the names of the file's format. Empty: the provider's library searches its usual sources."""

    values: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> str:
        return self.values.get(name, "")


def choose(address: RemoteAddress, environ: Mapping[str, str]) -> Credentials:
    """Return the credentials for a repository. Reads the file. Raises `StartupError` for one that cannot be used."""
    path = environ.get(FILE_VARIABLE, "")
    if not path:
        return _of_environment(address, environ)
    entries = _section(path, address.provider)
    matching = [key for key in entries if f"{address.url}/".startswith(key)]
    if not matching:
        raise StartupError(
            f"no credentials for the model repository '{address.url}': no key in \"{address.provider}\" of {path} "
            f'({FILE_VARIABLE}) begins it; add one, or "" for all'
        )
    return Credentials(_values(path, address.provider, entries[max(matching, key=len)]))


def _of_environment(address: RemoteAddress, environ: Mapping[str, str]) -> Credentials:
    """Azure's credentials from Triton's variables. The libraries for S3 and GCS read their variables themselves."""
    if address.provider != AZURE:
        return Credentials()
    kind = environ.get("AZURE_STORAGE_AUTH_TYPE", "")
    if kind and kind not in _AUTH_TYPES:
        raise StartupError(f"AZURE_STORAGE_AUTH_TYPE must be {' or '.join(_AUTH_TYPES)}, got '{kind}'")
    return Credentials(
        {
            "account_str": environ.get("AZURE_STORAGE_ACCOUNT", ""),
            "account_key": environ.get("AZURE_STORAGE_KEY", ""),
            "auth_type": kind,
            "client_id": environ.get("AZURE_STORAGE_CLIENT_ID", ""),
        }
    )


def _section(path: str, provider: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = json.load(file)
    except OSError as error:
        raise StartupError(
            f"the credentials file '{path}' ({FILE_VARIABLE}) cannot be read: {error.strerror}"
        ) from None
    except ValueError:
        raise StartupError(f"the credentials file '{path}' ({FILE_VARIABLE}) is not JSON") from None
    section = content.get(provider, {}) if isinstance(content, dict) else None
    if not isinstance(section, dict):
        raise _malformed(path, f'"{provider}" must be an object of URL beginnings')
    return section


def _values(path: str, provider: str, entry: Any) -> dict[str, str]:
    if provider == GCS:
        if not isinstance(entry, str):
            raise _malformed(path, f'an entry of "{GCS}" must be the path of a key file')
        return {"file": entry}
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise _malformed(path, f'an entry of "{provider}" must be an object of strings')
    if unknown := sorted(entry.keys() - _FIELDS[provider]):
        known = ", ".join(sorted(_FIELDS[provider]))
        raise _malformed(path, f"an entry of \"{provider}\" has the unknown field '{unknown[0]}', it may have {known}")
    return dict(entry)


def _malformed(path: str, why: str) -> StartupError:
    return StartupError(f"the credentials file '{path}' ({FILE_VARIABLE}) cannot be used: {why}")
