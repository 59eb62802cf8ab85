"""Opens remote repositories: chooses the provider's adapter, and the directory for copies of models.

Adapters import their provider's library, which is an optional dependency and slow to import, so each is imported only
when it is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from charonia.errors import CharoniaError, StartupError
from executors.repository.roots import Root

from .copies import Copies
from .credentials import choose
from .root import RemoteRoot
from .store import AZURE, GCS, S3, ObjectStore, RemoteAddress, parse

MOUNT_VARIABLES = {
    S3: "TRITON_AWS_MOUNT_DIRECTORY",
    GCS: "TRITON_GCS_MOUNT_DIRECTORY",
    AZURE: "TRITON_AZURE_MOUNT_DIRECTORY",
}
EXTRAS = {S3: "s3", GCS: "gcs", AZURE: "azure"}
_LOUD = ("boto3", "botocore", "s3transfer", "google", "azure", "msal")
"""Loggers of the libraries. Below the level of warnings they log each request, tokens included."""
_LOUDER = "urllib3"
"""A logger that warns of each surplus or broken connection. We log the resulting errors ourselves."""


class RemoteRepositories:
    """Opens a process's remote repositories. `directory` is for copies, unless a variable names another one; "": the
    system's temporary directory."""

    def __init__(self, environ: Mapping[str, str], directory: str = "") -> None:
        self._environ = environ
        self._directory = directory

    def open(self, url: str, config_name: str | None) -> Root:
        """Open a repository without listing it. Raises `StartupError`."""
        address = parse(url)
        for logger in _LOUD:
            logging.getLogger(logger).setLevel(logging.WARNING)
        logging.getLogger(_LOUDER).setLevel(logging.ERROR)
        try:
            store = self._store(address)
        except CharoniaError as error:
            raise StartupError(error.message) from None
        mount = self._environ.get(MOUNT_VARIABLES[address.provider], "")
        place = mount or self._directory
        copies = Copies(Path(place) if place else None, address.url, stay=bool(mount))
        return RemoteRoot(address.url, store, copies, config_name)

    def _store(self, address: RemoteAddress) -> ObjectStore:
        credentials = choose(address, self._environ)
        try:
            match address.provider:
                case "s3":
                    from .s3 import S3Store

                    return S3Store(address, credentials, self._environ)
                case "gs":
                    from .gcs import GcsStore

                    return GcsStore(address, credentials, self._environ)
                case _:
                    from .azure import AzureStore

                    return AzureStore(address, credentials, self._environ)
        except ImportError as error:
            raise StartupError(
                f"the model repository '{address.url}' needs a package that is not installed ({error.name}): "
                f"pip install 'charonia[{EXTRAS[address.provider]}]'"
            ) from None
