"""MLflow models (`backend: "mlflow"`, a version directory with MLmodel) through their flavour python_function.

Such a model is Python code and pickles: it runs in a sandbox, or where its operator lets models bring code.
"""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from charonia.backend import Array, Backend, Format, GraphSignature, InstanceSpec, Model, ModelSource, TensorSignature
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument, NotFound, Unsupported

FLAVOUR = "python_function"
INPUT, OUTPUT = "inputs", "predictions"
"""What a tensor without a name is called: the words of MLflow's own server."""

_COLUMNS = {
    "boolean": "BOOL",
    "integer": "INT32",
    "long": "INT64",
    "float": "FP32",
    "double": "FP64",
    "string": "BYTES",
    "binary": "BYTES",
    "datetime": "BYTES",
}


class MlflowBackend(Backend):
    name, api, isolation = "mlflow", (1, 0), "sandbox"
    opens_safely = True  # MLmodel alone is read; code runs when an instance is made
    formats = (Format(files=("MLmodel",)),)
    requires = (("mlflow", "charonia-mlflow"), ("pandas", "charonia-mlflow"))

    async def load(self, source: ModelSource) -> MlflowModel:
        return await asyncio.to_thread(MlflowModel, source)


class MlflowModel(Model):
    """The model and its signature; all instances share it."""

    def __init__(self, source: ModelSource) -> None:
        self._folder, metadata = _metadata(source)
        self._source, self._pyfunc = source, None
        self._lock = asyncio.Lock()
        given = metadata.signature
        self.inputs = _tensors(source, INPUT, given and given.inputs)
        self.outputs = _tensors(source, OUTPUT, given and given.outputs)
        self.kinds = _kinds(given and given.inputs)
        self.is_frame = bool(given and given.inputs and not given.inputs.is_tensor_spec())
        self.is_named = bool(given and given.inputs and given.inputs.has_input_names())
        self.parameters = _parameters(source, given and given.params)
        for written, known in ((source.config.input, self.inputs), (source.config.output, self.outputs)):
            names = [tensor.name for tensor in known]
            for item in written:
                if names and item.name not in names:
                    raise InvalidArgument(
                        f"model '{source.name}' has no tensor '{item.name}', its signature has {names}"
                    )

    async def signature(self) -> GraphSignature | None:
        if not self.inputs or not self.outputs:
            side = "outputs" if self.inputs else "inputs"
            if not (self._source.config.output if self.inputs else self._source.config.input):
                raise InvalidArgument(
                    f"the signature of model '{self._source.name}' has no {side}: write them into its configuration, "
                    "or save it with mlflow.models.infer_signature(inputs, predictions)"
                )
            return None
        return GraphSignature(self.inputs, self.outputs)

    async def create_instance(self, spec: InstanceSpec) -> MlflowInstance:
        if spec.kind == "GPU":
            raise Unsupported(f"model '{spec.source.name}' asks for a GPU instance, but this plug-in runs on CPUs")
        async with self._lock:
            if self._pyfunc is None:
                self._pyfunc = await asyncio.to_thread(_pyfunc, self._source, self._folder)
        return MlflowInstance(self, self._pyfunc, spec)

    async def close(self) -> None:
        self._pyfunc = None


class MlflowInstance:
    rows_fail_alone = True
    """What a row may hold is the model's business: one that it refuses fails no other request."""

    def __init__(self, model: MlflowModel, pyfunc: Any, spec: InstanceSpec) -> None:
        self._model, self._pyfunc = model, pyfunc
        self._outputs = spec.interface.outputs
        self._batching = spec.interface.batching

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        if self._pyfunc is None:
            raise InternalError("the model is closed")
        for name in outputs:
            if name not in self._outputs:
                raise InvalidArgument(f"there is no output '{name}', there are {list(self._outputs)}")
        given = self._given(inputs)
        rows = len(next(iter(inputs.values()))) if self._batching and inputs else None
        try:
            result = self._pyfunc.predict(given, params=self._model.parameters or None)
            return {name: self._answer(name, result, rows) for name in outputs}
        except CharoniaError:
            raise
        except Exception as error:  # code of others
            wrong = getattr(error, "error_code", "") == "INVALID_PARAMETER_VALUE"
            raise (InvalidArgument if wrong else InternalError)(f"MLflow: {_reason(error)}") from None

    def _given(self, inputs: Mapping[str, Array]) -> Any:
        """What `predict` takes: a table, named arrays, or one array."""
        import pandas

        model = self._model
        found = {name: _values(array, model.kinds.get(name, "")) for name, array in inputs.items()}
        if model.is_frame:
            columns = {name: array.reshape(-1) for name, array in found.items()}
            for name, kind in model.kinds.items():
                if kind == "datetime" and name in columns:
                    try:
                        columns[name] = pandas.to_datetime(columns[name], format="ISO8601")
                    except (TypeError, ValueError) as error:
                        raise InvalidArgument(
                            f"input '{name}' has no date and time of ISO 8601: {_reason(error)}"
                        ) from None
            if len({len(column) for column in columns.values()}) > 1:
                raise InvalidArgument("the columns of a table must have as many rows each")
            table = pandas.DataFrame(columns, columns=[name for name in model.kinds if name in columns])
            return table if model.is_named else table.set_axis(range(table.shape[1]), axis=1)
        if not model.is_named and len(found) == 1:
            return next(iter(found.values()))
        return found

    def _answer(self, name: str, result: Any, rows: int | None) -> Array:
        import pandas

        named = isinstance(result, Mapping | pandas.DataFrame)
        if named and name in result:
            result = result[name]
        elif (named and len(self._outputs) > 1) or isinstance(result, Mapping):
            raise InternalError(f"MLflow: the model gave {[str(key) for key in result]}, no '{name}'")
        elif len(self._outputs) > 1:
            raise InternalError(f"MLflow: the model gave one {type(result).__name__}, no outputs by name")
        datatype = self._outputs[name].datatype
        array = np.asarray(result.toarray() if hasattr(result, "toarray") else result)
        if rows is not None and (array.ndim == 0 or len(array) != rows):
            raise InternalError(f"MLflow: output '{name}' has shape {list(array.shape)} for {rows} rows")
        if array.ndim == 1 and len(self._outputs[name].backend_dims) + (rows is not None) == 2:
            array = array[:, np.newaxis]
        if datatype is DataType.BYTES:
            elements = [one if isinstance(one, bytes) else str(one).encode() for one in array.flat]
            return np.array(elements, object).reshape(array.shape)
        return np.ascontiguousarray(array, datatype.numpy)

    def close(self) -> None:
        self._pyfunc = None


def _metadata(source: ModelSource) -> tuple[Path, Any]:
    """The directory with MLmodel, and what that says. No code of the model has run."""
    # before the library is imported: it would report its use, look for git, and open a database
    for key, word in (("MLFLOW_DISABLE_TELEMETRY", "true"), ("DO_NOT_TRACK", "true"), ("GIT_PYTHON_REFRESH", "quiet")):
        os.environ[key] = word
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow.models import Model as Metadata

    root = source.version_directory.resolve()
    path = root / (source.config.default_model_filename or "MLmodel")
    path = path / "MLmodel" if path.is_dir() else path
    if not path.resolve().is_relative_to(root):
        raise InvalidArgument(f"the file of model '{source.name}' is outside the version directory: '{path}'")
    if not path.is_file():
        raise NotFound(f"unable to find '{path}' for model '{source.name}'")
    try:
        found = Metadata.load(str(path))
        flavours = sorted(found.flavors)
    except Exception as error:  # whatever the library raises for a file that is none
        raise InternalError(f"MLflow cannot read '{path.name}' of model '{source.name}': {_reason(error)}") from None
    if FLAVOUR not in flavours:
        raise InvalidArgument(
            f"model '{source.name}' has no flavour {FLAVOUR}, only {', '.join(flavours)}: MLflow cannot run it"
        )
    return path.parent, found


def _pyfunc(source: ModelSource, folder: Path) -> Any:
    source.check_code(f"flavour {FLAVOUR} of MLflow is Python code and pickles")
    from mlflow import pyfunc

    try:
        return pyfunc.load_model(str(folder))
    except ImportError as error:
        raise Unsupported(
            f"model '{source.name}' needs what is not installed where it runs: {_reason(error)}; its requirements.txt "
            "names what it was saved with"
        ) from None
    except Exception as error:  # code of others
        raise InternalError(f"MLflow cannot open model '{source.name}': {_reason(error)}") from None


def _named(schema: Any, unnamed: str) -> Iterator[tuple[str, Any]]:
    """Each tensor or column of one side of a signature, with its name or the one it gets."""
    items = list(schema.inputs) if schema else []
    for index, item in enumerate(items):
        alone = unnamed if len(items) == 1 else f"{unnamed}_{index}"
        yield alone if item.name is None else str(item.name), item


def _tensors(source: ModelSource, unnamed: str, schema: Any) -> tuple[TensorSignature, ...]:
    """One side of a signature; what has one value a row has dims [-1, 1]. None of it is trusted."""
    found = []
    for name, item in _named(schema, unnamed):
        shape: tuple[int, ...] = (-1,)
        if schema.is_tensor_spec():
            shape = tuple(int(dim) for dim in item.shape)
            try:
                datatype = DataType.of_numpy(np.dtype(item.type)).value
            except CharoniaError:
                datatype = ""
        else:
            datatype = _COLUMNS.get(getattr(item.type, "name", ""), "")
        if not datatype:
            raise Unsupported(f"'{name}' of model '{source.name}' has type {item.type}, which no tensor can hold")
        found.append(TensorSignature(name, datatype, (*shape, 1) if len(shape) == 1 else shape))
    return tuple(found)


def _kinds(schema: Any) -> dict[str, str]:
    """The kind of each input: a type of column, "vector" for a tensor of rank 1, "" for other tensors."""
    if not schema:
        return {}
    if schema.is_tensor_spec():
        return {name: "vector" if len(item.shape) == 1 else "" for name, item in _named(schema, INPUT)}
    return {name: item.type.name for name, item in _named(schema, INPUT) if hasattr(item.type, "name")}


def _parameters(source: ModelSource, schema: Any) -> dict[str, Any]:
    """`params` of every prediction: the model's parameter PARAMS, an object of JSON, checked by names."""
    said = source.parameter("PARAMS")
    if said is None:
        return {}
    try:
        found = json.loads(said)
    except ValueError:
        found = None
    known = [one.name for one in schema.params] if schema else []
    if not isinstance(found, dict):
        raise InvalidArgument(f"parameter 'PARAMS' of '{source.name}' must be an object of JSON, got '{said}'")
    unknown = [name for name in found if name not in known]
    if unknown:
        raise InvalidArgument(f"model '{source.name}' has no params {unknown}, its signature has {known}")
    return found


def _values(array: Array, kind: str) -> Array:
    if kind == "vector":
        array = array.reshape(-1)
    if array.dtype != object or kind == "binary":
        return array
    try:
        return np.array([element.decode() for element in array.flat], object).reshape(array.shape)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"a text is not UTF-8: {error}") from None


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
