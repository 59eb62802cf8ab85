"""Opens remote repositories: chooses the provider's adapter and the directory its models are copied into.

The adapters import their provider's library, which is an extra of the package and slow to import: only here, and only
for a provider that is asked for.
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
from .store import ObjectStore
from .store_addresses import AZURE, GCS, S3, RemoteAddress, parse

MOUNT_VARIABLES = {
    S3: "TRITON_AWS_MOUNT_DIRECTORY",
    GCS: "TRITON_GCS_MOUNT_DIRECTORY",
    AZURE: "TRITON_AZURE_MOUNT_DIRECTORY",
}
EXTRAS = {S3: "s3", GCS: "gcs", AZURE: "azure"}
_LOUD = ("boto3", "botocore", "s3transfer", "google", "azure", "msal")
"""Loggers of the libraries: below warnings they tell of each request, tokens included."""
_LOUDER = "urllib3"
"""It warns of more connections than it keeps, and of each that breaks: what comes of it is told here."""


class RemoteRepositories:
    """Opens them for one process. `directory` is where copies go that no variable places; "" for the system's own."""

    def __init__(self, environ: Mapping[str, str], directory: str = "") -> None:
        self._environ = environ
        self._directory = directory

    def open(self, url: str, config_name: str | None) -> Root:
        """A repository of which nothing is known yet. Raises `StartupError`."""
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
