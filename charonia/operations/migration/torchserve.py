"""Reads TorchServe's model archives (`.mar`): the manifest, `model-config.yaml`, and all files."""

from __future__ import annotations

from pathlib import Path

from charonia.errors import InvalidArgument

from .archives import read_archive
from .migrated_model import MigratedModel, load_json, load_yaml, mapping, model_name, read_text, whole

_BUILT_IN = {"image_classifier", "image_segmenter", "object_detector", "text_classifier"}
_CONFIG_WHY = {
    "responseTimeout": "charonia.max_execution_s, a parameter of the model, ends a batch that takes longer",
    "deviceType": "kind in instance_group",
    "deviceIds": "gpus in instance_group",
    "parallelType": "a model over several devices is what its code makes of it",
    "torchrun": "a model over several devices is what its code makes of it",
    "jobQueueSize": "max_queue_size in dynamic_batching's default_queue_policy",
    "maxWorkers": "the number of instances does not change by itself",
}


def read(path: Path, unpacked: Path) -> list[MigratedModel]:
    """The model of an archive, which is unpacked into an empty directory. Raises `InvalidArgument`."""
    names = read_archive(path, unpacked)
    if "MAR-INF/MANIFEST.json" not in names:
        raise InvalidArgument(f"'{path.name}' has no MAR-INF/MANIFEST.json")
    manifest = load_json(read_text(unpacked / "MAR-INF/MANIFEST.json"), "MANIFEST.json")
    about = mapping(manifest.get("model"), "model")
    model = MigratedModel(
        model_name(str(about.get("modelName") or path.stem), f"'{path.name}'"), f"TorchServe's {path.name}"
    )
    model.use_version("model.modelVersion", _version(about.get("modelVersion")))
    model.files = {name: unpacked / name for name in names if not name.startswith("MAR-INF/")}
    if "model.py" in names:
        model.leave_out("model.py", "the name is this server's: it is now original_model.py, change imports of it")
    _config(model, unpacked, names, about)
    handler, weights = str(about.get("handler", "")), str(about.get("serializedFile", ""))
    if weights.endswith(".onnx") and weights in model.files:
        model.backend = "onnxruntime"
        model.files["model.onnx"] = model.files.pop(weights)
        if handler:
            model.leave_out("model.handler", f"'{handler}' is not run: what it does around may be a python model "
                            "and an ensemble")  # fmt: skip
        return [model]
    model.code = handler
    model.steps = [
        f"initialize: load {weights or 'the weights'}" + (" (as the handler's initialize does)" if handler else ""),
        f"execute: preprocess, inference and postprocess of the handler '{handler}'",
        "config.pbtxt: inputs and outputs, which the manifest does not have",
    ]
    if handler.partition(":")[0].removesuffix(".py") in _BUILT_IN:
        model.leave_out("model.handler", f"'{handler}' is TorchServe's own: its transforms have to be written out")
    for key in ("requirementsFile", "extraFiles"):
        if about.get(key):
            why = "install them, or use EXECUTION_ENV_PATH" if key == "requirementsFile" else "copied beside model.py"
            model.leave_out(f"model.{key}", why)
    return [model]


def _version(written: object) -> object:
    """TorchServe writes "1.0" for the first version."""
    text = str(written or "1")
    return text.removesuffix(".0") if text.endswith(".0") else text


def _config(model: MigratedModel, unpacked: Path, names: list[str], about: dict[str, object]) -> None:
    name = str(about.get("configFile") or "model-config.yaml")
    if name not in names:
        return
    config = mapping(next(iter(load_yaml(read_text(unpacked / name), name)), None), name)
    model.max_batch_size = whole(config.pop("batchSize", 0), "batchSize")
    model.max_delay_us = 1000 * whole(config.pop("maxBatchDelay", 0), "maxBatchDelay", 3_600_000)
    model.instances = whole(config.pop("minWorkers", 0), "minWorkers", 1024)
    for key in sorted(config):
        model.leave_out(f"{name}: {key}", _CONFIG_WHY.get(key, "has no counterpart, the handler may read it"))
