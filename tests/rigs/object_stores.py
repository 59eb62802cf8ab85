"""Object stores on loopback ports: moto for S3, gcp-storage-emulator for Google's, azurite for Azure's.

moto and Google's emulator come with the tests' own packages. Azurite is used where it is: `npm install -g azurite`, or
CHARONIA_TEST_AZURITE, the path of azurite-blob, and the extra `azure`. Stopped by their pids only.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from free_ports import free_port

BUCKET = "models"
AZURITE = os.environ.get("CHARONIA_TEST_AZURITE") or shutil.which("azurite-blob") or ""
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Every azurite has this account and key."""

S3_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "eu-central-1"}


class S3Bucket:
    """In a moto server of its own."""

    environment = S3_ENVIRONMENT

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.client = self.client_as("key", "secret")
        self.client.create_bucket(
            Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": S3_ENVIRONMENT["AWS_DEFAULT_REGION"]}
        )

    def client_as(self, key_id: str, secret: str, service: str = "s3") -> Any:
        import boto3

        region = S3_ENVIRONMENT["AWS_DEFAULT_REGION"]
        return boto3.session.Session(key_id, secret, region_name=region).client(service, endpoint_url=self.endpoint)

    def url(self, path: str = "", bucket: str = BUCKET) -> str:
        return f"s3://{self.endpoint}/{bucket}/{path}"

    def put(self, name: str, content: bytes | str) -> None:
        self.client.put_object(Bucket=BUCKET, Key=name, Body=content)

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=name)


class GcsBucket:
    """In an emulator of its own."""

    def __init__(self, endpoint: str) -> None:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage

        self.environment = {"STORAGE_EMULATOR_HOST": endpoint}
        self._client = storage.Client(
            project="test", credentials=AnonymousCredentials(), client_options={"api_endpoint": endpoint}
        )
        self._bucket = self._client.create_bucket(BUCKET)

    def url(self, path: str = "", bucket: str = BUCKET) -> str:
        return f"gs://{bucket}/{path}"

    def put(self, name: str, content: bytes | str) -> None:
        self._bucket.blob(name).upload_from_string(content)

    def delete(self, name: str) -> None:
        self._bucket.blob(name).delete()


class AzureBucket:
    """A container of an azurite of its own."""

    def __init__(self, endpoint: str) -> None:
        from azure.storage.blob import ContainerClient

        self.environment = {"AZURE_STORAGE_ACCOUNT": AZURITE_ACCOUNT, "AZURE_STORAGE_KEY": AZURITE_KEY}
        self._endpoint = endpoint
        self._container = ContainerClient(f"{endpoint}/{AZURITE_ACCOUNT}", BUCKET, credential=AZURITE_KEY)
        self._container.create_container()

    def url(self, path: str = "", bucket: str = BUCKET) -> str:
        return f"as://{self._endpoint}/{AZURITE_ACCOUNT}/{bucket}/{path}"

    def put(self, name: str, content: bytes | str) -> None:
        self._container.upload_blob(name, content, overwrite=True)

    def put_directory(self, name: str) -> None:
        self._container.upload_blob(name, b"", metadata={"hdi_isfolder": "true"})

    def delete(self, name: str) -> None:
        self._container.delete_blob(name)


def missing(kind: str) -> str:
    """Why there is no server of a kind ("s3", "gs", "as") here; "" when there is one."""
    wanted = {"s3": ("boto3", "moto"), "gs": ("google.cloud.storage", "gcp_storage_emulator"), "as": ("azure.storage",)}
    for module in wanted[kind]:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"the package {module} is not installed"
    return "azurite-blob is not on PATH" if kind == "as" and not AZURITE else ""


@contextmanager
def s3_bucket() -> Iterator[S3Bucket]:
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with _running(command, r"Running on (http://[\d.:]+)") as endpoint:
        yield S3Bucket(endpoint)


@contextmanager
def gcs_bucket() -> Iterator[GcsBucket]:
    port = free_port()
    where = ("--host=127.0.0.1", f"--port={port}", "--in-memory")
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", *where]
    with _running(command, "", port) as endpoint:
        yield GcsBucket(endpoint)


@contextmanager
def azure_bucket() -> Iterator[AzureBucket]:
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        command = [AZURITE, "--blobPort", str(port), "--location", directory, "--silent", "--skipApiVersionCheck"]
        with _running(command, "", port) as endpoint:
            yield AzureBucket(endpoint)


BUCKETS = {"s3": s3_bucket, "gs": gcs_bucket, "as": azure_bucket}


@contextmanager
def _running(command: list[str], announced: str, port: int = 0) -> Iterator[str]:
    """A server's URL once it says so in the words of `announced`, or takes connections on `port`."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield _endpoint(process, log, announced, port)
        finally:
            process.kill()
            process.wait()


def _endpoint(process: subprocess.Popen[bytes], log: Any, announced: str, port: int) -> str:
    give_up_at = time.monotonic() + 60
    while time.monotonic() < give_up_at and process.poll() is None:
        if port:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return f"http://127.0.0.1:{port}"
        else:
            log.seek(0)
            if found := re.search(announced, log.read()):
                return found[1]
        time.sleep(0.02)
    log.seek(0)
    raise AssertionError(f"{_command(process)} does not serve:\n{log.read()}")


def _command(process: subprocess.Popen[bytes]) -> str:
    return " ".join(map(str, process.args)) if isinstance(process.args, list) else str(process.args)
