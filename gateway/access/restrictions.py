"""Restricted APIs (H53, G28, E9) and forwarded headers (H21, G27), from the operator's options. Pure.

Each front maps its URLs or methods to groups, and words its refusals.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from charonia.errors import InvalidArgument, StartupError

if TYPE_CHECKING:
    from charonia.inference import Parameters

GROUPS = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
"""The API groups (H53), the same for both protocols (G28)."""

GRPC_KEY_PREFIX = "triton-grpc-protocol-"
"""What the metadata keys of restricted protocols begin with (G28)."""

MAX_HEADER_NAME = 256
"""Longer names are never forwarded, so that no pattern is matched against a long hostile text."""

_RESERVED = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)

RawHeaders = Iterable[tuple[bytes, bytes]]


class Restrictions:
    """The headers that API groups require. `word` is a front's word for a group ("api", "protocol").

    `refusal` makes the error for a missing header from its name, which begins with `header_prefix`. Raises
    `StartupError` for an unknown group, one listed twice, or a header that is no name.
    """

    def __init__(
        self,
        entries: tuple[tuple[tuple[str, ...], str, str], ...],
        refusal: Callable[[str], Exception],
        *,
        word: str = "api",
        header_prefix: str = "",
    ) -> None:
        self._refusal = refusal
        self._keys: dict[str, tuple[str, bytes, bytes]] = {}
        for groups, header, value in entries:
            name = header_prefix + header
            if not name.isascii():
                raise StartupError(f"header '{header}' of a restricted {word} must be ASCII, as names of headers are")
            for group in groups:
                if group not in GROUPS:
                    raise StartupError(f"unknown restricted {word} '{group}', expected one of {', '.join(GROUPS)}")
                if group in self._keys:
                    raise StartupError(f"restricted {word} '{group}' can not be specified in multiple config groups")
                self._keys[group] = (name, name.lower().encode(), value.encode())
        self.any = bool(self._keys)

    def check(self, group: str, headers: RawHeaders) -> None:
        """Raises the front's refusal (E9) unless `headers` (names in lower case) hold the group's key."""
        key = self._keys.get(group)
        if key is None:
            return
        header, name, value = key
        # all are compared, each in constant time, so that the time reveals nothing about the value
        matches = [hmac.compare_digest(given, value) for found, given in headers if found == name]
        if not any(matches):
            raise self._refusal(header)


class HeaderForwarding:
    """`--http-header-forward-pattern` and its gRPC twin: headers whose whole name matches become string parameters.

    Matching ignores case unless the pattern starts with `(?-i)` (H21). `option` is the flag of the pattern. Raises
    `StartupError` for an invalid pattern.
    """

    def __init__(self, pattern: str, option: str) -> None:
        self._pattern: re.Pattern[str] | None = None
        self.any = bool(pattern)
        """Whether any headers are forwarded."""
        if not pattern:
            return
        flags = re.IGNORECASE
        written = pattern
        if pattern.startswith("(?-i)"):
            pattern, flags = pattern[len("(?-i)") :], re.NOFLAG
        try:
            self._pattern = re.compile(pattern, flags)
        except re.error as error:
            raise StartupError(f"invalid {option} '{written}': {error}") from None

    def forward(self, headers: RawHeaders, parameters: Parameters) -> None:
        """Add the matching headers to `parameters`. Raises `InvalidArgument` for a reserved name."""
        if self._pattern is None:
            return
        for raw_name, value in headers:
            if len(raw_name) > MAX_HEADER_NAME:
                continue
            name = raw_name.decode("latin-1")
            if self._pattern.fullmatch(name) is None:
                continue
            if name in _RESERVED or name.startswith("triton_"):
                raise InvalidArgument(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
            parameters[name] = value.decode("latin-1")
