"""The adapter for S3 and compatible stores, with boto3.

Without explicit credentials, boto3 uses AWS_ACCESS_KEY_ID and related variables, AWS_PROFILE, or the machine's role.
Without any of these, requests are not signed, as for public buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import boto3
import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.exceptions import ConnectionError as UnreachableError

from .credentials import Credentials
from .store import ObjectChanged, RemoteAddress, RemoteError, RemoteObject, Sink

_CHUNK_BYTES = 1 << 20
_CONNECT_S, _READ_S, _TRIES = 5, 30, 3
_CONNECTIONS = 32
_DEFAULT_REGION = "us-east-1"
_DENIED = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken")
_ELSEWHERE = ("301", "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")


class S3Store:
    """One repository in a bucket."""

    page_objects = 1000
    """The maximum number of objects in one page of a listing."""

    def __init__(self, address: RemoteAddress, credentials: Credentials, environ: Mapping[str, str]) -> None:
        """Makes no request yet, except for the machine's role. Raises `RemoteError` for half a key or no profile."""
        self._address = address
        if bool(credentials["key_id"]) != bool(credentials["secret_key"]):
            raise RemoteError(f"the model repository '{address.url}' cannot be used: key_id and secret_key go together")
        try:
            core = botocore.session.Session()
            # times are only compared, and parsing them takes four fifths of a listing's time
            core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_as_it_is)
            session = boto3.session.Session(
                botocore_session=core,
                aws_access_key_id=credentials["key_id"] or None,
                aws_secret_access_key=credentials["secret_key"] or None,
                aws_session_token=credentials["session_token"] or None,
                region_name=credentials["region"] or None,
                profile_name=credentials["profile"] or None,
            )
            signed = session.get_credentials() is not None
            self._client: Any = session.client(
                "s3",
                endpoint_url=address.endpoint or None,
                region_name=session.region_name or environ.get("AWS_REGION") or _DEFAULT_REGION,
                config=Config(
                    connect_timeout=_CONNECT_S,
                    read_timeout=_READ_S,
                    max_pool_connections=_CONNECTIONS,
                    retries={"total_max_attempts": _TRIES, "mode": "standard"},
                    s3={"addressing_style": "path"} if address.endpoint else {},
                    **({} if signed else {"signature_version": UNSIGNED}),
                ),
            )
        except (BotoCoreError, ValueError) as error:
            raise RemoteError(f"the model repository '{address.url}' cannot be used: {error}") from None

    def objects(self, below: str = "") -> Iterator[RemoteObject]:
        prefix = self._address.prefix
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._address.bucket, Prefix=prefix + below, PaginationConfig={"PageSize": self.page_objects}
        )
        try:
            for page in pages:
                for entry in page.get("Contents", ()):
                    name = entry["Key"].removeprefix(prefix)
                    stamp = f"{entry['ETag']} {entry['LastModified']}"
                    yield RemoteObject(name.rstrip("/"), entry["Size"], stamp, name.endswith("/"))
        except (BotoCoreError, ClientError) as error:
            raise self._failure(error) from None

    def copy(self, found: RemoteObject, sink: Sink) -> None:
        key = self._address.prefix + found.name
        try:
            answer = self._client.get_object(
                Bucket=self._address.bucket, Key=key, IfMatch=found.stamp.partition(" ")[0]
            )
            with closing(answer["Body"]) as body:
                for chunk in body.iter_chunks(_CHUNK_BYTES):
                    sink.write(chunk)
        except ClientError as error:
            if _status(error) in (404, 412):
                raise ObjectChanged(f"{found.name!r} of '{self._address.url}' changed while it was fetched") from None
            raise self._failure(error) from None
        except BotoCoreError as error:
            raise self._failure(error) from None

    def close(self) -> None:
        self._client.close()

    def _failure(self, error: BotoCoreError | ClientError) -> RemoteError:
        url, bucket = self._address.url, self._address.bucket
        where = self._address.endpoint or "AWS S3"
        if isinstance(error, UnreachableError):
            why = f"{where} cannot be reached ({type(error).__name__}); check the host, the port and the network"
        elif not isinstance(error, ClientError):
            why = str(error)
        elif (code := str(error.response.get("Error", {}).get("Code", ""))) == "NoSuchBucket":
            why = f"{where} has no bucket '{bucket}'; check the URL"
        elif code in _DENIED or _status(error) in (401, 403):
            why = (
                f"access to the bucket '{bucket}' was denied ({code}); the identity that AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, AWS_PROFILE or TRITON_CLOUD_CREDENTIAL_PATH name must be allowed to list and "
                "read it"
            )
        elif code in _ELSEWHERE:
            why = f"the bucket '{bucket}' is in another region ({code}); set AWS_DEFAULT_REGION to its own"
        else:
            why = f"{where} answered {_status(error)} {code}".removesuffix(f" {_status(error)}")
        return RemoteError(f"the model repository '{url}' cannot be read: {why}")


def _as_it_is(time: Any) -> Any:
    return time


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
