"""Reads KServe's `InferenceService` documents: custom predictors, and model formats that this server has."""

from __future__ import annotations

from pathlib import Path

from charonia.errors import InvalidArgument

from .migrated_model import MigratedModel, RefusedModel, load_yaml, mapping, model_name, read_text, sequence, whole

_PREDICTOR_WHY = {
    "minReplicas": "replicas are executors: start as many",
    "maxReplicas": "replicas are executors: start as many",
    "scaleTarget": "replicas are executors: start as many",
    "scaleMetric": "replicas are executors: start as many",
    "timeout": "a deadline is the client's; charonia.max_execution_s bounds executions",
    "batcher": "taken over as dynamic_batching where it has numbers",
    "logger": "the journal (--journal) says what became of each request",
    "canaryTrafficPercent": "two versions of a model, and clients that name one",
    "serviceAccountName": "credentials are the repository's, see docs/howto/remote-repositories.md",
}
_REPOSITORY_FORMATS = {"triton"}
_FILES = {"onnx": ("onnxruntime", "model.onnx")}


def read(path: Path) -> list[MigratedModel | RefusedModel]:
    """The models of all InferenceServices in a file. Raises `InvalidArgument`."""
    if path.is_dir():
        raise InvalidArgument(f"'{path}' is a directory: name the YAML file that has the InferenceService")
    services = [
        mapping(document, path.name)
        for document in load_yaml(read_text(path), path.name)
        if isinstance(document, dict) and document.get("kind") == "InferenceService"
    ]
    if not services:
        raise InvalidArgument(f"'{path.name}' has no InferenceService")
    return [_read(service, path) for service in services]


def _read(service: dict[str, object], path: Path) -> MigratedModel | RefusedModel:
    try:
        return _model(service, path)
    except InvalidArgument as error:
        metadata = service.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        return RefusedModel(path.name, f"InferenceService '{str(name or '')[:80]}': {error.message}")


def _model(service: dict[str, object], path: Path) -> MigratedModel:
    name = mapping(service.get("metadata"), "metadata").get("name")
    model = MigratedModel(model_name(str(name or path.stem), f"'{path.name}'"), f"KServe's {path.name}")
    spec = mapping(service.get("spec"), "spec")
    predictor = mapping(spec.get("predictor"), "spec.predictor")
    for part in ("transformer", "explainer"):
        if part in spec:
            model.leave_out(f"spec.{part}", "make it a python model, and an ensemble of both (docs/howto/ensembles.md)")
    concurrency = predictor.pop("containerConcurrency", None)
    if concurrency:
        model.instances = whole(concurrency, "containerConcurrency", 1024)
    batcher = mapping(predictor.get("batcher"), "batcher")
    model.max_batch_size = whole(batcher.get("maxBatchSize", 0), "maxBatchSize")
    model.max_delay_us = 1000 * whole(batcher.get("maxLatency", 0), "maxLatency", 3_600_000)
    containers = sequence(predictor.pop("containers", None), "containers")
    runtime = mapping(predictor.pop("model", None), "spec.predictor.model")
    if runtime:
        _of_format(model, runtime)
    elif containers:
        _of_container(model, mapping(containers[0], "containers"))
    else:
        raise InvalidArgument(f"the InferenceService '{model.name}' has neither a model nor containers")
    for key in sorted(predictor):
        model.leave_out(f"spec.predictor.{key}", _PREDICTOR_WHY.get(key, "has no counterpart"))
    return model


def _of_format(model: MigratedModel, runtime: dict[str, object]) -> None:
    word = str(mapping(runtime.get("modelFormat"), "modelFormat").get("name", ""))
    uri = str(runtime.get("storageUri", ""))
    if word in _REPOSITORY_FORMATS:
        raise InvalidArgument(
            f"'{model.name}' is a Triton repository already: use --model-repository={uri or '<its directory>'}"
        )
    if word in _FILES:
        model.backend, file = _FILES[word]
        model.leave_out("storageUri", f"'{uri}' is not fetched: copy the model to {model.name}/{model.version}/{file}")
    else:
        model.code = word
        model.steps = [f"initialize: load the {word or 'model'} from '{uri}'", "execute: predict",
                       "config.pbtxt: inputs and outputs, which the service does not have"]  # fmt: skip
        model.leave_out("modelFormat", f"there is no backend for '{word}': a python model calls its library")
        model.leave_out("storageUri", f"'{uri}' is not fetched: copy it into {model.name}/{model.version}")
    _resources(model, runtime)


def _of_container(model: MigratedModel, container: dict[str, object]) -> None:
    image = str(container.get("image", ""))
    model.code = image
    model.steps = [
        f"initialize: what load() of the kserve.Model in the image '{image}' does",
        "execute: what its preprocess, predict and postprocess do",
        "config.pbtxt: inputs and outputs, which the service does not have",
    ]
    model.leave_out("image", f"'{image}' holds the code and its packages: copy the code beside model.py, "
                    "install the packages or use EXECUTION_ENV_PATH")  # fmt: skip
    for key in ("args", "command", "env", "envFrom", "volumeMounts"):
        if container.get(key):
            model.leave_out(f"containers.{key}", "parameters of config.pbtxt reach the model in args['model_config']")
    _resources(model, container)


def _resources(model: MigratedModel, container: dict[str, object]) -> None:
    limits = mapping(mapping(container.get("resources"), "resources").get("limits"), "limits")
    gpus = limits.pop("nvidia.com/gpu", 0)
    model.on_gpu = whole(gpus, "nvidia.com/gpu", 64) > 0
    model.leave_out_all((f"resources.limits.{key}" for key in limits), "limits are the executor's, not a model's")
