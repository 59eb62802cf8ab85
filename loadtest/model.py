"""Asks a server what a model takes and gives; the only part that sends anything but inference requests."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

# Bytes per element of the fixed-size datatypes of the v2 protocol; BYTES elements carry their own length.
ELEMENT_SIZES = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip

CONTROL_TIMEOUT_S = 30


class LoadTestError(Exception):
    """A run that cannot start or go on, with a sentence for the user."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, datatype and shape of one tensor; -1 is a dimension that the request chooses."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """What a request is addressed to and made of. `version` is empty when the server is to choose."""

    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]


def split_url(url: str, default_port: int) -> tuple[str, int]:
    """Host and port of "host:port", "host", "[v6]:port" or the same behind "http://" or "grpc://"."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        scheme, rest = "", url
    if scheme not in ("", "http", "grpc"):
        raise LoadTestError(f"unsupported scheme in --url {url!r}: only plain http:// and grpc:// are spoken")
    host, mark, port = rest.rstrip("/").rpartition(":")
    if not mark or port.endswith("]"):
        host, port = rest.rstrip("/"), str(default_port)
    if not host or not port.isdigit():
        raise LoadTestError(f"--url must be HOST:PORT, got {url!r}")
    return host.strip("[]"), int(port)


def describe_over_http(
    host: str, port: int, name: str, version: str = "", headers: Sequence[tuple[str, str]] = ()
) -> Model:
    """The model's metadata (GET v2/models/NAME). Raises LoadTestError with the server's own words."""
    path = f"/v2/models/{quote(name, safe='')}" + (f"/versions/{version}" if version else "")
    connection = http.client.HTTPConnection(host, port, timeout=CONTROL_TIMEOUT_S)
    try:
        connection.request("GET", path, headers=dict(headers))
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise LoadTestError(f"cannot reach http://{host}:{port}: {error}") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise LoadTestError(f"GET {path} answered {answer.status}: {body[:300].decode(errors='replace')}")
    try:
        document = json.loads(body)
        return Model(
            name,
            version,
            tuple(TensorSpec(t["name"], t["datatype"], tuple(map(int, t["shape"]))) for t in document["inputs"]),
            tuple(t["name"] for t in document["outputs"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise LoadTestError(f"GET {path} did not answer model metadata: {error!r}") from None


def describe_over_grpc(
    host: str, port: int, name: str, version: str = "", headers: Sequence[tuple[str, str]] = ()
) -> Model:
    """The model's metadata (ModelMetadata). Raises LoadTestError with the server's own words."""
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with grpc.insecure_channel(address) as channel:
        try:
            answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelMetadata(
                service_pb2.ModelMetadataRequest(name=name, version=version),
                timeout=CONTROL_TIMEOUT_S,
                metadata=list(headers),
            )
        except grpc.RpcError as error:
            raise LoadTestError(f"grpc://{address}: {error.code().name}: {error.details()}") from None
    return Model(
        name,
        version,
        tuple(TensorSpec(t.name, t.datatype, tuple(t.shape)) for t in answer.inputs),
        tuple(t.name for t in answer.outputs),
    )


def resolve_shapes(model: Model, batch: int | None, shapes: dict[str, tuple[int, ...]]) -> Model:
    """The model with every input dimension fixed.

    A leading -1 becomes `batch` (1 unless given). `shapes` (by input name; "" for a sole input) gives the dimensions
    either in full or without the leading one. Raises LoadTestError for a name, rank or dimension that does not fit.
    """
    given = dict(shapes)
    if "" in given:
        if len(model.inputs) != 1:
            names = ", ".join(spec.name for spec in model.inputs)
            raise LoadTestError(f"--shape needs NAME:dims, model '{model.name}' has inputs {names}")
        given[model.inputs[0].name] = given.pop("")
    resolved = []
    for spec in model.inputs:
        dims = spec.shape
        wanted = given.pop(spec.name, None)
        if wanted is not None:
            if len(wanted) == len(dims) - 1 and dims[0] == -1:
                wanted = (-1, *wanted)
            if len(wanted) != len(dims) or any(d not in (-1, w) for d, w in zip(dims, wanted, strict=True)):
                raise LoadTestError(f"--shape {list(wanted)} does not fit input '{spec.name}' of shape {list(dims)}")
            dims = wanted
        if dims and dims[0] == -1:
            dims = (batch or 1, *dims[1:])
        elif batch is not None and (not dims or dims[0] != batch):
            raise LoadTestError(f"--batch {batch} does not fit input '{spec.name}' of shape {list(dims)}")
        if any(d < 0 for d in dims):
            raise LoadTestError(f"input '{spec.name}' has the dynamic shape {list(spec.shape)}: give --shape")
        resolved.append(replace(spec, shape=dims))
    if given:
        raise LoadTestError(f"--shape names unknown input '{next(iter(given))}' of model '{model.name}'")
    return replace(model, inputs=tuple(resolved))
