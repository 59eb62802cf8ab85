"""Runs a configuration's `model_repository_agents` before a model is loaded (C23, R43).

Triton's agents are shared libraries with its C interface. The one it ships, `checksum`, is built in here
(`executors.repository.checksums`). Any other is searched where Triton would search: a missing one gets Triton's error,
an existing one is rejected, because it cannot be loaded here.
"""

from __future__ import annotations

from pathlib import Path

from charonia.errors import CharoniaError, InvalidArgument, Unsupported
from charonia.models.config_errors import StructureError
from protos.model_config_pb2 import ModelConfig

from .checksums import AGENT as CHECKSUM
from .checksums import verify_checksums

DEFAULT_DIRECTORY = "/opt/tritonserver/repoagents"
"""Where Triton searches without `--repoagent-directory`."""


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
