"""The `checksum` repository agent (C23): compares a model's files with the hashes in its configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from charonia.errors import InvalidArgument, Unsupported

from .files import contained

AGENT = "checksum"
_ALGORITHMS = ("md5", "sha256")


def verify_checksums(directory: Path, hashes: Mapping[str, str]) -> None:
    """Compare files, given by keys `<algorithm>:<path in the model directory>`, with their hexadecimal hashes.

    Reads the files whole. Raises `InvalidArgument` for a file that differs or is missing, `Unsupported` for an
    algorithm other than MD5 and SHA256.
    """
    for key, expected in sorted(hashes.items()):
        algorithm, colon, relative = key.partition(":")
        if not colon:
            raise InvalidArgument(f"failed to parse key: {key}")
        if algorithm.lower() not in _ALGORITHMS:
            raise Unsupported(f"Unsupported checksum algorithm: {algorithm}")
        found = _digest(directory, algorithm.lower(), relative)
        if found != expected.lower():
            raise InvalidArgument(
                f"Mismatched {algorithm.upper()} hash for file {relative}, expect: {expected}, got: {found}"
            )


def _digest(directory: Path, algorithm: str, relative: str) -> str:
    path = contained(directory, relative)
    if path is None:
        raise InvalidArgument(f"failed to open text file for read {relative}: it is outside the model directory")
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise InvalidArgument(f"failed to open text file for read {relative}: {error.strerror}") from None
