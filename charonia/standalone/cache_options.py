"""The response cache's options (K1): `--cache-config <cache>,<key>=<value>[,<key>=<value>]` and its old spelling.

The cache is always shared by all gateways and lies in their log; `local` is Triton's name for one without a server of
its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from charonia.errors import StartupError
from charonia.options import Values

_log = logging.getLogger(__name__)

LOCAL = "local"
REDIS = "redis"


def cache_size_bytes(values: Values) -> int:
    """How many bytes of responses are cached, 0 for no cache. Raises `StartupError`."""
    entries, old = values["cache_config"], values["response_cache_byte_size"]
    if old is not None:
        if entries:
            raise StartupError("--response-cache-byte-size is the old spelling of --cache-config; give one of them")
        _log.warning("--response-cache-byte-size is the old spelling of --cache-config local,size=<bytes>")
        return int(old)
    return _of_entries(entries) if entries else 0


def _of_entries(entries: Sequence[str]) -> int:
    name, given = "", dict[str, str]()
    for entry in entries:
        cache, *pairs = entry.split(",")
        if not cache or not pairs or not all(pair.partition("=")[0] and "=" in pair for pair in pairs):
            raise StartupError(f"--cache-config must be <cache>,<key>=<value>, got '{entry}'")
        if name and cache != name:
            raise StartupError("found multiple cache configurations, but only a single cache is currently supported")
        name = cache
        given.update((key, value) for key, _, value in (pair.partition("=") for pair in pairs))
    if name == REDIS:
        raise StartupError(
            "--cache-config redis needs no server of its own here: responses are cached in the log, which all gateways "
            "share; give --cache-config local,size=<bytes>"
        )
    if name != LOCAL:
        raise StartupError(f"unknown cache '{name}' in --cache-config: there is {LOCAL}")
    for key in given:
        if key != "size":
            raise StartupError(f"unknown setting '{key}' in --cache-config {LOCAL}: there is size")
    size = given["size"]
    if not (size.isascii() and size.isdecimal() and len(size) <= 18):
        raise StartupError(f"the size in --cache-config {LOCAL} must be a number of bytes, got '{size}'")
    return int(size)
