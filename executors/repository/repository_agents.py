"""Runs a configuration's `model_repository_agents` before a model is loaded (C23, R43).

Triton's agents are shared libraries with its C interface. The one it ships, `checksum`, is built in here: it
compares a model's files with the hashes in its configuration. Any other is searched where Triton would search: a
missing one gets Triton's error, an existing one is rejected, because it cannot be loaded here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from charonia.errors import CharoniaError, InvalidArgument, Unsupported
from charonia.models.config_errors import StructureError
from protos.model_config_pb2 import ModelConfig

from .files import contained

DEFAULT_DIRECTORY = "/opt/tritonserver/repoagents"
"""Where Triton searches without `--repoagent-directory`."""

CHECKSUM = "checksum"
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


class RepositoryAgents:
    """The agents of one executor. `directory` is `--repoagent-directory`, "" for the default."""

    def __init__(self, directory: str = "") -> None:
        self._directory = directory or DEFAULT_DIRECTORY

    def run(self, model: Path, config: ModelConfig) -> None:
        """Run the agents on a model directory, in their order. Reads files.

        Raises `StructureError` with the reason of the first that rejects the model. Triton runs agents when it polls
        the repository, so clients only learn that the model could not be polled (C62).
        """
        try:
            for agent in config.model_repository_agents.agents:
                if agent.name == CHECKSUM:
                    verify_checksums(model, agent.parameters)
                else:
                    self._refuse(agent.name)
        except CharoniaError as error:
            raise StructureError(error.message) from error

    def _refuse(self, name: str) -> None:
        library = f"libtritonrepoagent_{name}.so"
        plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
        path = Path(self._directory, name, library)
        if plain and path.is_file():
            raise Unsupported(
                f"the repository agent '{name}' ({path}) is a library for another server: only '{CHECKSUM}' is built in"
            )
        raise InvalidArgument(f"unable to find '{library}' for repo agent '{name}', searched: {self._directory}")
