"""The adapter for Google Cloud Storage, with google-cloud-storage.

Without explicit credentials, Google's library uses GOOGLE_APPLICATION_CREDENTIALS, the user's login, or the machine's
account. Without any of these, and with STORAGE_EMULATOR_HOST, requests are anonymous.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import google.auth
from google.api_core.exceptions import (
    Forbidden,
    GoogleAPICallError,
    GoogleAPIError,
    NotFound,
    PreconditionFailed,
    Unauthorized,
)
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
from google.cloud import storage
from requests.exceptions import RequestException

from .credentials import Credentials
from .store import ObjectChanged, RemoteAddress, RemoteError, RemoteObject, Sink

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
_FIELDS = "items(name,size,generation),nextPageToken"
_ANSWER_S = (5.0, 30.0)
_RETRY_S = 10.0


class GcsStore:
    """One repository in a bucket."""

    def __init__(self, address: RemoteAddress, credentials: Credentials, environ: Mapping[str, str]) -> None:
        """May query the machine's identity. Raises `RemoteError` for a key file that cannot be used."""
        self._address = address
        emulated = bool(environ.get("STORAGE_EMULATOR_HOST"))
        who: Any = AnonymousCredentials()
        project = None
        try:
            if credentials["file"]:
                who, project = google.auth.load_credentials_from_file(credentials["file"], scopes=[_SCOPE])
            elif not emulated:
                who, project = google.auth.default(scopes=[_SCOPE])
        except DefaultCredentialsError as error:
            if credentials["file"] or environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
                raise RemoteError(f"the model repository '{address.url}' cannot be used: {error}") from None
        except OSError as error:
            why = f"{error.strerror} ({error.filename})"
            raise RemoteError(f"the model repository '{address.url}' cannot be used: {why}") from None
        # a project is only needed to create buckets
        self._client: Any = storage.Client(project=project or "none", credentials=who)
        self._bucket = self._client.bucket(address.bucket)
        self._retry = storage.retry.DEFAULT_RETRY.with_timeout(_RETRY_S)

    def objects(self, below: str = "") -> Iterator[RemoteObject]:
        prefix = self._address.prefix
        try:
            for blob in self._client.list_blobs(
                self._bucket, prefix=prefix + below, fields=_FIELDS, timeout=_ANSWER_S, retry=self._retry
            ):
                name = blob.name.removeprefix(prefix)
                yield RemoteObject(name.rstrip("/"), int(blob.size or 0), str(blob.generation), name.endswith("/"))
        except (GoogleAPIError, GoogleAuthError, RequestException) as error:
            raise self._failure(error) from None

    def copy(self, found: RemoteObject, sink: Sink) -> None:
        blob = self._bucket.blob(self._address.prefix + found.name)
        try:
            # raw: decoding a Content-Encoding would change the size
            blob.download_to_file(
                sink, raw_download=True, if_generation_match=int(found.stamp), timeout=_ANSWER_S, retry=self._retry
            )
        except (NotFound, PreconditionFailed):
            raise ObjectChanged(f"{found.name!r} of '{self._address.url}' changed while it was fetched") from None
        except (GoogleAPIError, GoogleAuthError, RequestException) as error:
            raise self._failure(error) from None

    def close(self) -> None:
        self._client.close()

    def _failure(self, error: Exception) -> RemoteError:
        bucket = self._address.bucket
        if isinstance(error, NotFound):
            why = f"Google Cloud Storage has no bucket '{bucket}'; check the URL"
        elif isinstance(error, (Forbidden, Unauthorized)):
            why = (
                f"access to the bucket '{bucket}' was denied ({error.code}); the identity that "
                "GOOGLE_APPLICATION_CREDENTIALS or TRITON_CLOUD_CREDENTIAL_PATH names must be allowed to list and read "
                "it"
            )
        elif isinstance(error, GoogleAPICallError):
            why = f"Google Cloud Storage answered {error.code}"
        elif isinstance(error, GoogleAuthError):
            why = f"no access token is to be had ({type(error).__name__}); check the key file"
        else:
            why = f"Google Cloud Storage cannot be reached ({type(error).__name__}); check the network"
        return RemoteError(f"the model repository '{self._address.url}' cannot be read: {why}")
