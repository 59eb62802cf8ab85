"""scikit-learn pipelines (`backend: "sklearn"`, file model.skops) as skops saves them: no code of a file runs.

skops lists the types in a file before it makes any; one that is not trusted is refused by name. scikit-learn does not
check all numbers in a file, and wrong ones may end the process: so models run in a process of their own.
"""

from __future__ import annotations

import asyncio
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from charonia.backend import Array, Backend, Format, GraphSignature, InstanceSpec, Model, ModelSource, TensorSignature
from charonia.datatypes import DataType
from charonia.errors import InternalError, InvalidArgument, NotFound, Unsupported

METHODS = ("predict", "predict_proba", "decision_function", "transform")
"""What an output may be called: the method of the pipeline that gives it."""


class SklearnBackend(Backend):
    name, api, isolation = "sklearn", (1, 0), "process"
    formats = (Format(files=("model.skops",)),)
    requires = (("skops", "charonia-sklearn"), ("sklearn", "charonia-sklearn"))

    async def load(self, source: ModelSource) -> SklearnModel:
        return await asyncio.to_thread(SklearnModel, source)


class SklearnModel(Model):
    """The pipeline, opened once for all instances: predictions change nothing in it."""

    def __init__(self, source: ModelSource) -> None:
        self._pipeline = _opened(source)
        config, methods = source.config, [method for method in METHODS if hasattr(self._pipeline, method)]
        if len(config.input) > 1:
            raise InvalidArgument(
                f"model '{source.name}' must have one input, a row of features, got {len(config.input)}"
            )
        for output in config.output:
            if output.name not in methods:
                raise InvalidArgument(
                    f"model '{source.name}' has no output '{output.name}': outputs are methods of the pipeline, "
                    f"{methods}"
                )

    async def signature(self) -> GraphSignature | None:
        return await asyncio.to_thread(_signature, self._pipeline)

    async def create_instance(self, spec: InstanceSpec) -> SklearnInstance:
        if spec.kind == "GPU":
            raise Unsupported(f"model '{spec.source.name}' asks for a GPU instance, but scikit-learn runs on CPUs")
        return SklearnInstance(self._pipeline, {name: one.datatype for name, one in spec.interface.outputs.items()})


class SklearnInstance:
    stateless = True

    def __init__(self, pipeline: Any, datatypes: Mapping[str, DataType]) -> None:
        self._pipeline, self._datatypes = pipeline, datatypes

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        (rows,) = inputs.values()
        if rows.dtype == object:
            texts = [element.decode() for element in rows.flat]
            # what reads texts takes a list of them, what encodes categories a table
            rows = texts if _features(self._pipeline) is None else np.array(texts, object).reshape(rows.shape)
        try:
            return {name: self._answer(name, getattr(self._pipeline, name)(rows)) for name in outputs}
        except (AttributeError, TypeError, ValueError) as error:
            raise InternalError(f"scikit-learn: {error}") from None

    def _answer(self, name: str, result: Any) -> Array:
        array = np.asarray(result.toarray() if hasattr(result, "toarray") else result)
        if array.ndim == 1:
            array = array[:, np.newaxis]
        if array.dtype.kind in "UO":
            return np.array([str(label).encode() for label in array.flat], object).reshape(array.shape)
        return np.ascontiguousarray(array, self._datatypes[name].numpy)

    def close(self) -> None:
        self._pipeline = None


def _opened(source: ModelSource) -> Any:
    import skops.io
    from skops.io.exceptions import UntrustedTypesFoundException

    path = source.version_directory / (source.config.default_model_filename or "model.skops")
    if not path.resolve().is_relative_to(source.version_directory.resolve()):
        raise InvalidArgument(f"the file of model '{source.name}' is outside the version directory: '{path}'")
    if not path.is_file():
        raise NotFound(f"unable to find '{path}' for model '{source.name}'")
    trusted = [word.strip() for word in (source.parameter("TRUSTED_TYPES") or "").split(",") if word.strip()]
    try:
        unknown = sorted(set(skops.io.get_untrusted_types(file=path)) - set(trusted))
        if not unknown:
            return skops.io.load(path, trusted=trusted)
    except UntrustedTypesFoundException as error:
        raise InvalidArgument(f"model '{source.name}': {error}") from None
    except (zipfile.BadZipFile, AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        raise InternalError(f"skops cannot open model '{source.name}': {error}") from None
    raise InvalidArgument(
        f"model '{source.name}' has types that are not trusted: {', '.join(unknown)}; name those that you trust in its "
        f"parameter TRUSTED_TYPES, separated by commas"
    )


def _features(pipeline: Any) -> int | None:
    """How many columns it takes; None for one that takes a list of texts."""
    return getattr(pipeline, "n_features_in_", None)


def _signature(pipeline: Any) -> GraphSignature:
    """Inputs and outputs for auto-complete, found by an empty question where the pipeline does not say."""
    features, labels = _features(pipeline), getattr(pipeline, "classes_", None)
    given = TensorSignature("features", "FP64" if features else "BYTES", (-1, features or 1))
    found = []
    for name in METHODS:
        if name == "transform" and hasattr(pipeline, "predict"):
            continue
        if hasattr(pipeline, name):
            if name == "predict" and labels is not None:
                result = np.asarray(labels)[:1]
            else:
                result = getattr(pipeline, name)(np.zeros((1, features)) if features else ["a"])
            array = np.asarray(result.toarray() if hasattr(result, "toarray") else result)
            kind = "BYTES" if array.dtype.kind in "UO" else DataType.of_numpy(array.dtype).value
            found.append(TensorSignature(name, kind, (-1, 1 if array.ndim == 1 else array.shape[1])))
    return GraphSignature((given,), tuple(found))
