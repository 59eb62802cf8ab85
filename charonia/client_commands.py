"""`charonia infer|submit|result|tail|models|stats|health`: asks a server, ours or another, with `charonia.client`.

Operators' commands, which read the log instead, are `charonia.operations`'. Exit codes: 0 done, 1 something failed or
the server is not ready, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InvalidArgument, Unsupported, without_credentials

if TYPE_CHECKING:
    from .client import Client, JobEvent, Result

URL = "http://localhost:8000"

_ATTEMPTS = {"health": 1, "submit": 8, "result": 8, "tail": 8}
"""Commands about jobs outlast a gateway's restart; the others soon say that there is no server."""
_FEW_ATTEMPTS = 4

_KINDS = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}
"""Kinds of NumPy's numbers, each with those of JSON values that it takes."""
_DECOUPLED = "doesn't support models with decoupled transaction policy"
"""How a server of either protocol ends its refusal of an inference that `--stream` would make possible."""

_MODEL_COLUMNS = (("model", "name"), ("version", "version"), ("state", "state"), ("reason", "reason"))
_STATISTICS_COLUMNS = (
    ("model", "name"),
    ("version", "version"),
    ("inferences", "inferences"),
    ("executions", "executions"),
    ("failed", "failed"),
    ("queue us", "queue"),
    ("compute us", "compute"),
)


def run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """The command line `words` (the command first); the exit code.

    Raises `SystemExit` for usage and help, and the `CharoniaError` that a server, or its absence, is.
    """
    options = parser().parse_args(list(words))
    from .client import Client, RetryPolicy, Tls

    url = options.url or environment.get("CHARONIA_URL") or URL
    headers = dict(_named(header, ":", "--header") for header in options.header)
    retry = RetryPolicy(_ATTEMPTS.get(options.command, _FEW_ATTEMPTS))
    with Client(url, headers=headers, retry=retry, tls=Tls(ca_file=options.ca_file)) as client:
        return _HANDLERS[options.command](client, options)


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    root = argparse.ArgumentParser(prog="charonia", allow_abbrev=False)
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument(
            "--url",
            default="",
            metavar="URL",
            help=f"http://, https://, grpc:// or grpcs://, or http+unix:///PATH or grpc+unix:///PATH of a Unix socket "
            f"(CHARONIA_URL, else {URL})",
        )
        command.add_argument("--json", action="store_true", help="print JSON")
        command.add_argument(
            "--header", action="append", default=[], metavar="'NAME: VALUE'", help="send this header; repeatable"
        )
        command.add_argument("--ca-file", default="", metavar="FILE", help="trust these authorities (PEM)")
        return command

    def add_inference(command: argparse.ArgumentParser) -> None:
        command.add_argument("model")
        command.add_argument(
            "--input", action="append", default=[], metavar="NAME=VALUE", help="VALUE is JSON, text, @FILE.npy, or "
            "@FILE whose bytes are one element; it takes the type and shape that the model says, NAME:TYPE=VALUE where "
            "the server does not describe it; repeatable",
        )  # fmt: skip
        command.add_argument("--output", action="append", default=[], metavar="NAME", help="only this; repeatable")
        command.add_argument("--model-version", default="", metavar="V", help="instead of the newest that is ready")
        command.add_argument("--id", default="", help="the request's id")
        command.add_argument("--priority", type=int, default=0, metavar="N", help="priority level")
        command.add_argument("--timeout", type=float, default=None, metavar="S", help="deadline, from now")
        command.add_argument(
            "--parameter", action="append", default=[], metavar="NAME=VALUE", help="of the request; repeatable"
        )
        command.add_argument("--key", default="", help="idempotency key: the same key is executed once")

    command = add("infer", "ask a model and print its answer")
    add_inference(command)
    command.add_argument("--stream", action="store_true", help="print the responses of a decoupled model as they come")
    command.add_argument("--out", default="", metavar="DIR", help="write outputs there (.npy, BYTES as .json)")
    add_inference(add("submit", "make an inference a job and print its id"))
    command = add("result", "wait for the answer of a job and print it")
    command.add_argument("job")
    command.add_argument("--timeout", type=float, default=None, metavar="S", help="wait no longer; 0 asks once")
    command.add_argument("--out", default="", metavar="DIR", help="write outputs there (.npy, BYTES as .json)")
    command = add("tail", "print what happens to a job, and its responses, up to its end")
    command.add_argument("job")
    command.add_argument("--after", default="", metavar="PLACE", help="go on behind this event")
    add("models", "the models of the server's repository")
    command = add("stats", "statistics of models")
    command.add_argument("model", nargs="?", default="", help="only of this model")
    command.add_argument("--model-version", default="", metavar="V", help="only of this version")
    command = add("health", "whether the server, or a model, is ready; exit code 1 when it is not")
    command.add_argument("model", nargs="?", default="", help="ask about this model")
    return root


# -- inference and jobs ------------------------------------------------------------------------------------------------


def _infer(client: Client, options: argparse.Namespace) -> int:
    inputs, asked = _inputs(client, options), _asked(options)
    if options.stream:
        for result in client.stream(options.model, inputs, **asked):
            _print_result(result, options)
    else:
        try:
            _print_result(client.infer(options.model, inputs, **asked), options)
        except Unsupported as error:
            if error.message.endswith(_DECOUPLED):
                raise Unsupported(f"{error.message}: add --stream") from error
            raise
    return 0


def _submit(client: Client, options: argparse.Namespace) -> int:
    job = client.submit(options.model, _inputs(client, options), **_asked(options))
    assert job.receipt is not None
    _print(json.dumps(dict(job.receipt.fields)) if options.json else job.id)
    return 0


def _result(client: Client, options: argparse.Namespace) -> int:
    job = client.job(options.job)
    results = [job.result(options.timeout)] if client.is_grpc else job.results(options.timeout)
    for result in results:
        _print_result(result, options)
    return 0


def _tail(client: Client, options: argparse.Namespace) -> int:
    kind = ""
    for event in client.job(options.job).events(options.after):
        kind = event.kind
        _print(json.dumps(_event(event)) if options.json else _event_text(event))
    return 0 if kind in ("", "succeeded") else 1


def _asked(options: argparse.Namespace) -> Any:
    return {
        "outputs": options.output,
        "version": options.model_version,
        "request_id": options.id,
        "priority": options.priority,
        "timeout_s": options.timeout,
        "parameters": dict(_parameter(text) for text in options.parameter),
        "idempotency_key": options.key,
    }


def _inputs(client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """The arrays of the command line, of the types and shapes that the model's metadata says."""
    from .datatypes import DataType

    described: dict[str, Any] | None = None
    found = {}
    for text in options.input:
        name, value = _named(text, "=", "--input")
        plain, _, datatype = name.rpartition(":")
        if plain and datatype in DataType.__members__:
            found[plain] = array_of(plain, value, datatype, None)
            continue
        if described is None:
            metadata = client.metadata(options.model, options.model_version)
            described = {item["name"]: item for item in metadata.get("inputs") or ()}
        if name not in described:
            known = f"it has {', '.join(described)}" if described else f"which it does not describe: write {name}:TYPE="
            raise InvalidArgument(f"model '{options.model}' has no input '{name}'; {known}")
        found[name] = array_of(name, value, described[name]["datatype"], [int(d) for d in described[name]["shape"]])
    return found


def array_of(name: str, text: str, datatype: str, shape: Sequence[int] | None) -> Any:
    """The array that `text` stands for; its own shape where that of the input is not known.

    Raises `InvalidArgument` for one that does not fit the input.
    """
    import numpy as np

    from .datatypes import DataType

    wanted = DataType.of(datatype)
    if text.startswith("@") and text.endswith(".npy"):
        try:
            return np.load(text[1:], allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"input '{name}': '{text[1:]}' cannot be read: {error}") from None
    value: Any = _file(name, text[1:]) if text.startswith("@") else _value(text, wanted is DataType.BYTES)
    try:
        if wanted is DataType.BYTES:
            array = np.array(value, dtype=np.object_)
        else:
            if np.asarray(value).dtype.kind not in _KINDS.get(wanted.numpy.kind, "iuf"):
                raise InvalidArgument(f"input '{name}' is {datatype}, which '{text}' is not")
            array = np.array(value, dtype=wanted.numpy)
        if shape is None or array.ndim == len(shape):
            return array
        free = [-1 if dim < 0 else dim for dim in shape]
        if free.count(-1) > 1:
            free[0] = 1
        return array.reshape(free)
    except (ValueError, OverflowError) as error:
        about = "" if shape is None else f" of shape {list(shape)}"
        raise InvalidArgument(f"input '{name}'{about} cannot be '{text}': {error}") from None


def _value(text: str, is_text: bool) -> Any:
    """JSON; of strings, text that is no JSON list is meant as it is."""
    if is_text and not text.startswith("["):
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidArgument(f"'{text}' is no JSON: write a number, or a list of them") from None


def _file(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"input '{name}': '{path}' cannot be read: {error.strerror}") from None


def _parameter(text: str) -> tuple[str, Any]:
    name, value = _named(text, "=", "--parameter")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _named(text: str, separator: str, option: str) -> tuple[str, str]:
    name, found, value = text.partition(separator)
    if not found or not name.strip():
        raise InvalidArgument(f"{option} '{text}' is not NAME{separator}VALUE")
    return name.strip(), value.strip() if separator == ":" else value


# -- what a server is --------------------------------------------------------------------------------------------------


def _models(client: Client, options: argparse.Namespace) -> int:
    models = client.models()
    rows = [{name: value or None for name, value in model.items()} for model in models]  # over gRPC "" for none
    _print(json.dumps(models) if options.json else _table(rows, _MODEL_COLUMNS))
    return 0


def _stats(client: Client, options: argparse.Namespace) -> int:
    statistics = client.statistics(options.model, options.model_version)
    if options.json:
        _print(json.dumps(statistics))
        return 0
    _print(_table([_row(version) for version in statistics], _STATISTICS_COLUMNS))
    return 0


def _health(client: Client, options: argparse.Namespace) -> int:
    ready = client.ready(options.model)
    document: dict[str, Any] = {"ready": ready}
    if not options.model:
        metadata = client.metadata()
        document |= {"live": client.live(), "name": metadata.get("name", ""), "version": metadata.get("version", "")}
    words = "ready" if ready else "live, not ready" if document.get("live") else "not ready"
    about = f" ({document['name']} {document['version']})" if "name" in document else ""
    _print(
        json.dumps(document) if options.json else f"{options.model or without_credentials(client.url)}: {words}{about}"
    )
    return 0 if ready else 1


def _row(version: Mapping[str, Any]) -> dict[str, Any]:
    """Times are means of one inference, in microseconds."""
    spent = version.get("inference_stats", {})

    def mean_us(*names: str) -> int:
        counts = [spent.get(name, {}).get("count", 0) for name in names]
        sums = [spent.get(name, {}).get("ns", 0) for name in names]
        return round(sum(sums) / max(counts) / 1000) if max(counts) else 0

    return {
        "name": version["name"],
        "version": version.get("version", ""),
        "inferences": version.get("inference_count", 0),
        "executions": version.get("execution_count", 0),
        "failed": spent.get("fail", {}).get("count", 0),
        "queue": mean_us("queue"),
        "compute": mean_us("compute_input", "compute_infer", "compute_output"),
    }


# -- output ------------------------------------------------------------------------------------------------------------


def _print_result(result: Result, options: argparse.Namespace) -> None:
    from .operations.text.tensor_text import saved_all

    if options.out:
        files = saved_all(list(result.tensors.values()), Path(options.out))
        _print(json.dumps({"files": files}) if options.json else "\n".join(files))
    elif options.json:
        _print(json.dumps(_document(result)))
    else:
        for tensor in result.tensors.values():
            _print(f"{tensor.name} {tensor.datatype.value} {list(tensor.shape)}\n{tensor.array()}")
        if not result.tensors:
            _print("(without outputs)")


def _document(result: Result) -> dict[str, Any]:
    from .operations.text.tensor_text import described

    return {
        **({"id": result.id} if result.id else {}),
        "model_name": result.model,
        "model_version": result.version,
        **({"parameters": dict(result.parameters)} if result.parameters else {}),
        "outputs": [described(tensor, whole=True) for tensor in result.tensors.values()],
    }


def _event(event: JobEvent) -> dict[str, Any]:
    document: dict[str, Any] = {"place": event.place, "event": event.kind}
    if event.kind != "response":
        return document | {"number": event.number, "time_us": event.time_us, "detail": dict(event.detail)}
    document["final"] = event.final
    if event.error:
        document["error"] = event.error
    if event.response is not None:
        document["response"] = _document(event.response)
    return document


def _event_text(event: JobEvent) -> str:
    if event.kind != "response":
        detail = " ".join(f"{name}={value}" for name, value in event.detail.items())
        return f"{event.kind} {detail}".rstrip()
    if event.error:
        return f"response {event.place} failed: {event.error}"
    if event.response is None:
        return f"response {event.place} (the last)"
    outputs = event.response.outputs.items()
    return f"response {event.place} " + (
        " ".join(f"{name}={array.tolist()}" for name, array in outputs) or "(without outputs)"
    )


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str]]) -> str:
    from .operations.text.rendering import table

    return "\n".join(table(rows, columns))


def _print(text: str) -> None:
    """At once: the reader of a stream sees each line when it comes."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


_HANDLERS: dict[str, Callable[[Client, argparse.Namespace], int]] = {
    "infer": _infer,
    "submit": _submit,
    "result": _result,
    "tail": _tail,
    "models": _models,
    "stats": _stats,
    "health": _health,
}
