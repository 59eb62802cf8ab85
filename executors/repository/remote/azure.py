"""The adapter for Azure Blob Storage, with azure-storage-blob, and azure-identity when there is no account key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from azure.core import MatchConditions
from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ResourceModifiedError,
    ResourceNotFoundError,
    ServiceRequestError,
)
from azure.storage.blob import BlobPrefix, ContainerClient, LinearRetry

from charonia.errors import StartupError

from .credentials import Credentials
from .store import ObjectChanged, RemoteAddress, RemoteError, RemoteObject, Sink

_CONNECT_S, _READ_S = 5, 30
_RETRIES, _BACKOFF_S = 2, 1


class AzureStore:
    """One repository in a container."""

    def __init__(self, address: RemoteAddress, credentials: Credentials, environ: Mapping[str, str]) -> None:
        """Makes no request yet. Raises `StartupError` when azure-identity is needed and missing, or the key is bad."""
        self._address = address
        try:
            self._client: Any = ContainerClient(
                address.endpoint,
                address.bucket,
                credential=_credential(address, credentials),
                connection_timeout=_CONNECT_S,
                read_timeout=_READ_S,
                retry_policy=LinearRetry(backoff=_BACKOFF_S, retry_total=_RETRIES, random_jitter_range=0),
            )
        except ValueError:  # the library's text may contain the key
            why = "its account key is malformed" if credentials["account_key"] else "identities need an https endpoint"
            raise StartupError(f"the model repository '{address.url}' cannot be used: {why}") from None

    def objects(self, below: str = "") -> Iterator[RemoteObject]:
        prefix = self._address.prefix
        try:
            for blob in self._client.list_blobs(name_starts_with=prefix + below, include=["metadata"]):
                if isinstance(blob, BlobPrefix):
                    continue
                name = blob.name.removeprefix(prefix)
                # accounts with a hierarchical namespace also list directories
                marked = (blob.metadata or {}).get("hdi_isfolder", "").lower() == "true"
                yield RemoteObject(name.rstrip("/"), int(blob.size), blob.etag, marked or name.endswith("/"))
        except AzureError as error:
            raise self._failure(error) from None

    def copy(self, found: RemoteObject, sink: Sink) -> None:
        try:
            download = self._client.download_blob(
                self._address.prefix + found.name, etag=found.stamp, match_condition=MatchConditions.IfNotModified
            )
            for chunk in download.chunks():
                sink.write(chunk)
        except (ResourceNotFoundError, ResourceModifiedError):
            raise ObjectChanged(f"{found.name!r} of '{self._address.url}' changed while it was fetched") from None
        except AzureError as error:
            raise self._failure(error) from None

    def close(self) -> None:
        self._client.close()

    def _failure(self, error: AzureError) -> RemoteError:
        url, container, account = self._address.url, self._address.bucket, self._address.account
        if isinstance(error, ResourceNotFoundError):
            why = f"the account '{account}' has no container '{container}'; check the URL"
        elif isinstance(error, ServiceRequestError):
            why = f"{self._address.endpoint} cannot be reached; check the account's name and the network"
        elif isinstance(error, ClientAuthenticationError) or getattr(error, "status_code", 0) in (401, 403):
            why = (
                f"access to the container '{container}' was denied; the identity that AZURE_STORAGE_ACCOUNT and "
                "AZURE_STORAGE_KEY, AZURE_STORAGE_AUTH_TYPE or TRITON_CLOUD_CREDENTIAL_PATH name must be allowed to "
                "list and read it"
            )
        elif isinstance(error, HttpResponseError):
            why = f"Azure answered {error.status_code} {getattr(error, 'error_code', None) or ''}".rstrip()
        else:
            why = f"the connection failed ({type(error).__name__})"
        return RemoteError(f"the model repository '{url}' cannot be read: {why}")


def _credential(address: RemoteAddress, credentials: Credentials) -> Any:
    """An account key, an identity, or None for a public container."""
    if credentials["account_key"]:
        return {
            "account_name": credentials["account_str"] or address.account,
            "account_key": credentials["account_key"],
        }
    if not credentials["auth_type"]:
        return None
    try:
        from azure.identity import DefaultAzureCredential, ManagedIdentityCredential
    except ImportError:
        raise StartupError(
            f"AZURE_STORAGE_AUTH_TYPE={credentials['auth_type']} needs a package that is not installed: "
            "pip install 'charonia[azure]'"
        ) from None
    client_id = credentials["client_id"] or None
    if credentials["auth_type"] == "managed_identity":
        return ManagedIdentityCredential(client_id=client_id)
    return DefaultAzureCredential(managed_identity_client_id=client_id)
