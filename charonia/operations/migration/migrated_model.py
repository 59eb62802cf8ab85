"""A model read from another server's files: its configuration, the files it needs, and what does not map."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf import text_format

from charonia.errors import InvalidArgument
from protos import model_config_pb2 as pb

DATA_TYPES = {
    name.removeprefix("TYPE_"): name for name, _ in pb.DataType.items() if name != "TYPE_INVALID"
} | {"BYTES": "TYPE_STRING"}  # fmt: skip
"""Names of the protocol, and those of `config.pbtxt` without their beginning."""

MAX_TEXT_BYTES = 4 << 20
"""A larger settings file or code of a service is a mistake."""
_MAX_VALUES = 1_000_000
"""Max values of a document: as many as the text can hold, but aliases of YAML could multiply them."""


@dataclass(frozen=True, slots=True)
class MigratedTensor:
    """An input or output. `data_type` is a name of `config.pbtxt`; `dims` have no batch dimension."""

    name: str
    data_type: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unmapped:
    """A setting that has no counterpart, or needs a decision."""

    field: str
    why: str


@dataclass(frozen=True, slots=True)
class RefusedModel:
    """A model that cannot be read. `file` is what describes it, `problem` names the field."""

    file: str
    problem: str

    def __str__(self) -> str:
        return self.problem if self.file in self.problem else f"'{self.file}': {self.problem}"


@dataclass(slots=True)
class MigratedModel:
    """A model of another server. `files` are copied to the version's directory: path there -> source path or content.

    `code` describes the user's code, for the skeleton of a python model; "" if none is needed.
    """

    name: str
    source: str
    backend: str = "python"
    version: int = 1
    max_batch_size: int = 0
    max_delay_us: int = 0
    instances: int = 0
    on_gpu: bool = False
    decoupled: bool = False
    inputs: list[MigratedTensor] = field(default_factory=list)
    outputs: list[MigratedTensor] = field(default_factory=list)
    files: dict[str, Path | bytes] = field(default_factory=dict)
    code: str = ""
    steps: list[str] = field(default_factory=list)
    """What the user must complete, a sentence each."""
    unmapped: list[Unmapped] = field(default_factory=list)

    def leave_out(self, name: str, why: str) -> None:
        self.unmapped.append(Unmapped(name, why))

    def leave_out_all(self, names: Iterable[str], why: str) -> None:
        for name in sorted(names):
            self.leave_out(name, why)

    def use_version(self, name: str, written: object) -> None:
        """Set the version, which must be a number here."""
        text = str(written or "1")
        if re.fullmatch(r"[1-9]\d{0,17}", text):
            self.version = int(text)
        else:
            self.leave_out(name, f"a version is a number here: '{text}' is now 1")


def config_text(model: MigratedModel) -> str:
    """The text of `config.pbtxt`."""
    config = pb.ModelConfig(name=model.name, backend=model.backend, max_batch_size=model.max_batch_size)
    for tensor in model.inputs:
        config.input.add(name=tensor.name, data_type=pb.DataType.Value(tensor.data_type), dims=tensor.dims)
    for tensor in model.outputs:
        config.output.add(name=tensor.name, data_type=pb.DataType.Value(tensor.data_type), dims=tensor.dims)
    if model.max_batch_size > 1:
        config.dynamic_batching.max_queue_delay_microseconds = model.max_delay_us
    if model.instances or model.on_gpu:
        kinds = pb.ModelInstanceGroup
        config.instance_group.add(count=model.instances or 1, kind=kinds.KIND_GPU if model.on_gpu else kinds.KIND_AUTO)
    if model.decoupled:
        config.model_transaction_policy.decoupled = True
    return text_format.MessageToString(config)


def model_name(text: str, what: str) -> str:
    """A name that can be a directory's; other signs become "_". Raises `InvalidArgument` for one without letters."""
    name = re.sub(r"[^\w.-]+", "_", text, flags=re.ASCII).strip("._-")
    if not name:
        raise InvalidArgument(f"{what} has no name that a model can have: '{text[:80]}'")
    return name[:200]


def read_text(path: Path) -> str:
    """A small file of text. Raises `InvalidArgument`."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"'{path}' cannot be read: {error.strerror}") from None
    return decoded(content, str(path))


def decoded(content: bytes, name: str) -> str:
    if len(content) > MAX_TEXT_BYTES:
        raise InvalidArgument(f"'{name}' is larger than {MAX_TEXT_BYTES >> 20} MiB")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"'{name}' is not UTF-8: {error}") from None


def whole(value: object, name: str, max_value: int = 2**31 - 1) -> int:
    """A whole number of at least 0. Raises `InvalidArgument`."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InvalidArgument(f"'{name}' must be a number, got {str(value)[:80]!r}")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        number = -1
    if not 0 <= number <= max_value:
        raise InvalidArgument(f"'{name}' must be a number from 0 to {max_value}, got {str(value)[:80]!r}")
    return int(number)


def mapping(value: object, name: str) -> dict[str, object]:
    """A JSON or YAML object; an absent one is empty. Raises `InvalidArgument`."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidArgument(f"'{name}' must be an object, got {str(value)[:80]!r}")
    return {str(key): item for key, item in value.items()}


def sequence(value: object, name: str) -> list[object]:
    """A JSON or YAML list; an absent one is empty. Raises `InvalidArgument`."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidArgument(f"'{name}' must be a list, got {str(value)[:80]!r}")
    return value


def load_yaml(text: str, name: str) -> list[object]:
    """The documents of a YAML text. Raises `InvalidArgument`, `StartupError` without PyYAML."""
    from charonia.errors import StartupError

    try:
        import yaml
    except ImportError:
        raise StartupError(f"'{name}' is YAML: install PyYAML (pip install 'charonia[migrate]')") from None
    try:
        documents = list(yaml.safe_load_all(text))
        _check_values(documents)
    # PyYAML's own constructors crash on values like `!!int ''`
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise InvalidArgument(f"'{name}' is not YAML: {' '.join(str(error).split())}") from None
    return documents


def load_json(text: str, name: str) -> dict[str, object]:
    """A JSON object. Raises `InvalidArgument`."""
    import json

    try:
        document = json.loads(text)
        _check_values(document)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"'{name}' is not JSON: {error}") from None
    return mapping(document, name)


def _check_values(document: object) -> None:
    """Raises `ValueError` for text that no file can hold, and for aliases that expand without end.

    NUL ends file names, and lone surrogates are not UTF-8.
    """
    waiting, seen = [document], 0
    while waiting:
        item = waiting.pop()
        seen += 1
        if seen + len(waiting) > _MAX_VALUES:
            raise ValueError(f"it has more than {_MAX_VALUES} values")
        if isinstance(item, str):
            if b"\0" in item.encode():
                raise ValueError("it has a NUL character")
        elif isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            waiting += item
