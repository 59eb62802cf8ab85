"""The options of the response cache (K1): `--cache-config <cache>,<key>=<value>[,<key>=<value>]` and its old spelling.

All gateways share the cache: `local` is in their log, `redis` on its own server.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from charonia.errors import StartupError

from .values import Values

_log = logging.getLogger(__name__)

LOCAL = "local"
REDIS = "redis"

UNBOUNDED = 2**50
"""The size of a cache that is bounded by its own server."""

_TLS_FILES = {"cacert": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
_WITHOUT_MEANING = {"connect_timeout", "socket_timeout", "pool_size", "wait_timeout"}
_OF_REDIS = {"host", "port", "user", "password", "db", "tls_enabled", "size", *_TLS_FILES, *_WITHOUT_MEANING}


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """`size_bytes` 0 means no cache; `url` is that of its own server, "" for the log."""

    size_bytes: int = 0
    url: str = ""


def cache_options(values: Values, environment: Mapping[str, str]) -> CacheOptions:
    """The cache's options. Raises `StartupError`.

    `environment` may hold TRITONCACHE_REDIS_USERNAME and TRITONCACHE_REDIS_PASSWORD.
    """
    entries, old = values["cache_config"], values["response_cache_byte_size"]
    if old is not None:
        if entries:
            raise StartupError("--response-cache-byte-size is the old spelling of --cache-config; give one of them")
        _log.warning("--response-cache-byte-size is the old spelling of --cache-config local,size=<bytes>")
        return CacheOptions(int(old))
    if not entries:
        return CacheOptions()
    name, given = _gathered(entries)
    if name == LOCAL:
        _check_keys(name, given, {"size"})
        return CacheOptions(_number(name, "size", given["size"]))
    if name == REDIS:
        _check_keys(name, given, _OF_REDIS)
        size_bytes = _number(name, "size", given["size"]) if "size" in given else UNBOUNDED
        return CacheOptions(size_bytes, _url(given, environment))
    raise StartupError(f"unknown cache '{name}' in --cache-config: there are {LOCAL} and {REDIS}")


def _gathered(entries: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The name of the only cache, and its settings; of a repeated setting the last value counts."""
    name, given = "", dict[str, str]()
    for entry in entries:
        cache, *pairs = entry.split(",")
        if not cache or not pairs or not all(pair.partition("=")[0] and "=" in pair for pair in pairs):
            shown = entry.partition(",")[0] if "password" in entry else entry
            raise StartupError(f"--cache-config must be <cache>,<key>=<value>, got '{shown}'")
        if name and cache != name:
            raise StartupError("found multiple cache configurations, but only a single cache is currently supported")
        name = cache
        given.update((key, value) for key, _, value in (pair.partition("=") for pair in pairs))
    return name, given


def _check_keys(name: str, given: Mapping[str, str], known: set[str]) -> None:
    for key in given:
        if key not in known:
            raise StartupError(f"unknown setting '{key}' in --cache-config {name}: there is {', '.join(sorted(known))}")


def _number(name: str, key: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise StartupError(f"the {key} in --cache-config {name} must be a whole number, got '{text}'")
    return int(text)


def _url(given: Mapping[str, str], environment: Mapping[str, str]) -> str:
    if not given.get("host"):
        raise StartupError(f"--cache-config {REDIS} needs the setting host")
    user = given.get("user", environment.get("TRITONCACHE_REDIS_USERNAME", ""))
    password = given.get("password", environment.get("TRITONCACHE_REDIS_PASSWORD", ""))
    tls = given.get("tls_enabled", "false").lower()
    if tls not in ("true", "false"):
        raise StartupError(f"the tls_enabled in --cache-config {REDIS} must be true or false, got '{tls}'")
    files = {ours: given[theirs] for theirs, ours in _TLS_FILES.items() if theirs in given}
    if files and tls == "false":
        raise StartupError(f"certificates in --cache-config {REDIS} need tls_enabled=true")
    idle = sorted(_WITHOUT_MEANING & given.keys())
    if idle:
        _log.info("--cache-config %s: %s without meaning here, one connection is kept", REDIS, ", ".join(idle))
    host = given["host"]
    signed_in = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
    where = f"[{host}]" if ":" in host else host
    port, database = _number(REDIS, "port", given.get("port", "6379")), _number(REDIS, "db", given.get("db", "0"))
    scheme = "rediss" if tls == "true" else "redis"
    query = "?" + urlencode(files) if files else ""
    return f"{scheme}://{signed_in}{where}:{port}/{database}{query}"
