"""Reads BentoML services from their code, which is parsed and never run, and `bentofile.yaml`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from charonia.errors import InvalidArgument

from .migrated_model import (
    DATA_TYPES,
    MigratedModel,
    MigratedTensor,
    RefusedModel,
    load_yaml,
    mapping,
    model_name,
    read_text,
    whole,
)

_SCALARS = {
    "str": "TYPE_STRING",
    "bytes": "TYPE_STRING",
    "int": "TYPE_INT64",
    "float": "TYPE_FP64",
    "bool": "TYPE_BOOL",
}
_NUMPY = {"float16": "FP16", "float32": "FP32", "float64": "FP64", "bool": "BOOL"} | {
    f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
_CONFIG_WHY = {
    "traffic": "deadlines are the client's, limits are max_queue_size and charonia.max_execution_s",
    "workers": "",
    "logging": "--log-verbose and its like, for the server",
    "metrics": "the server has its own; a model adds some with pb_utils.MetricFamily",
}
_FILE_WHY = {
    "python": "install the packages, or use EXECUTION_ENV_PATH",
    "docker": "the image is this server's",
    "models": "copy the models into the version directory",
    "conda": "EXECUTION_ENV_PATH takes an environment",
    "envs": "the environment is the server's; parameters of config.pbtxt reach the model",
}

_CODE_FILE = "bento_*.py"
"""Stands in a step for the name of the service's file in the version directory."""


def read(path: Path) -> list[MigratedModel | RefusedModel]:
    """One model for each API of the service in a `service.py`, a `bentofile.yaml` or their directory."""
    file, notes = _service_file(path)
    try:
        text = read_text(file)
        tree = ast.parse(text, file.name)
        models = [model for node in tree.body if isinstance(node, ast.ClassDef) for model in _of_class(node, file)]
        models += _of_functions(tree, file)
    except (SyntaxError, ValueError) as error:
        raise InvalidArgument(f"'{file.name}' is not Python: {error}") from None
    except (RecursionError, MemoryError):  # of the parser, whose stack is full
        raise InvalidArgument(f"'{file.name}' is nested too deeply to be read") from None
    if not models and re.search(r"^\s*(from|import) kserve\b", text, re.MULTILINE):
        raise InvalidArgument(
            f"'{file.name}' is the code of a KServe predictor: name the YAML file that has its InferenceService"
        )
    if not models:
        raise InvalidArgument(f"'{file.name}' has no API: a class with @bentoml.service and methods with @bentoml.api")
    for model in models:
        if isinstance(model, RefusedModel):
            continue
        model.files[f"bento_{file.name}"] = file
        model.steps = [step.replace(_CODE_FILE, f"bento_{file.name}") for step in model.steps]
        for key, why in notes.items():
            model.leave_out(f"bentofile.yaml: {key}", why)
    return models


def _service_file(path: Path) -> tuple[Path, dict[str, str]]:
    directory = path if path.is_dir() else path.parent
    if path.suffix == ".py":
        return path, {}
    bentofile = path if path.is_file() else directory / "bentofile.yaml"
    if not bentofile.is_file():
        return directory / "service.py", {}
    settings = mapping(next(iter(load_yaml(read_text(bentofile), bentofile.name)), None), bentofile.name)
    module = str(settings.pop("service", "service")).partition(":")[0].removesuffix(".py")
    file = (directory / (module.replace(".", "/") + ".py")).resolve()
    if not file.is_relative_to(directory.resolve()):
        raise InvalidArgument(f"the service '{module[:200]}' of {bentofile.name} lies outside its directory")
    ignored = {"include", "exclude", "labels", "description", "name"}
    return file, {key: _FILE_WHY.get(key, "has no counterpart") for key in sorted(settings.keys() - ignored)}


def _decorator(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, last: str) -> ast.expr | None:
    """The decorator whose dotted name ends like this, as `bentoml.api` or an imported `api` does."""
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) == last:
            return decorator
    return None


def _options(decorator: ast.expr | None) -> dict[str, object]:
    """The keywords of a call that are literals."""
    found: dict[str, object] = {}
    for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
        try:
            found[keyword.arg or ""] = ast.literal_eval(keyword.value)
        except (ValueError, RecursionError):
            found[keyword.arg or ""] = None
    return found


def _of_class(node: ast.ClassDef, file: Path) -> list[MigratedModel | RefusedModel]:
    decorator = _decorator(node, "service")
    if decorator is None:
        return []
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    apis = [(part, found) for part in methods if (found := _decorator(part, "api") or _decorator(part, "task"))]
    models: list[MigratedModel | RefusedModel] = []
    options = _options(decorator)
    for method, api in apis:
        name = str(options.get("name") or node.name)
        name = name if len(apis) == 1 else f"{name}_{method.name}"
        where = f"{node.name}.{method.name}"
        try:
            model = MigratedModel(model_name(name, f"'{file.name}'"), f"BentoML's {file.name}, {where}")
            _settings(model, dict(options))
            _api(model, method, _options(api))
        except InvalidArgument as error:
            models.append(RefusedModel(file.name, f"{where}: {error.message}"))
        else:
            models.append(model)
    return models


def _of_functions(tree: ast.Module, file: Path) -> list[MigratedModel]:
    """APIs of services from before BentoML 1.2: `svc = bentoml.Service(...)`, `@svc.api(input=..., output=...)`."""
    models = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (api := _decorator(node, "api")) is not None:
            model = MigratedModel(model_name(node.name, f"'{file.name}'"), f"BentoML's {file.name}, {node.name}")
            _api(model, node, _options(api))
            model.leave_out("runners", "each runner may be a model of its own, which this one calls (BLS)")
            models.append(model)
    return models


def _settings(model: MigratedModel, options: dict[str, object]) -> None:
    resources = options.pop("resources", None)
    if isinstance(resources, dict):
        model.on_gpu = bool(resources.get("gpu", 0))
        model.leave_out_all(
            (f"resources.{key}" for key in resources if key != "gpu"), "what a machine has is the executor's"
        )
    if isinstance(workers := options.pop("workers", None), int):
        model.instances = whole(workers, "workers", 1024)
    for key in sorted(options.keys() - {"name"}):
        model.leave_out(f"service({key}=...)", _CONFIG_WHY.get(key) or "has no counterpart")


def _api(model: MigratedModel, method: ast.FunctionDef | ast.AsyncFunctionDef, options: dict[str, object]) -> None:
    batchable = options.pop("batchable", False) is True
    if batchable:
        model.max_batch_size = whole(options.pop("max_batch_size", None) or 100, "max_batch_size")
        # BentoML's bound on the latency is no delay: a part of it is left for the model
        if (latency := options.pop("max_latency_ms", None)) is not None:
            model.leave_out("api(max_latency_ms=...)", f"a target of {latency} ms is charonia.target_p99_ms "
                            "(docs/howto/adaptive-batching.md)")  # fmt: skip
    for key in sorted(options.keys() - {"batchable", "max_batch_size", "max_latency_ms", "input", "output"}):
        model.leave_out(f"api({key}=...)", "routes and batch dimensions are the protocol's")
    arguments = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
    for argument in arguments:
        if argument.arg not in ("self", "ctx", "context"):
            model.inputs.append(_tensor(model, argument.arg, argument.annotation, batchable))
    returns = method.returns
    if isinstance(returns, ast.Subscript) and ast.unparse(returns.value).rpartition(".")[2] in (
        "Generator", "AsyncGenerator", "Iterator", "AsyncIterator",
    ):  # fmt: skip
        model.decoupled = True
        returns = next(iter(returns.slice.elts), None) if isinstance(returns.slice, ast.Tuple) else returns.slice
    model.outputs.append(_tensor(model, "output", returns, batchable))
    model.code = method.name
    model.steps = [
        "initialize: what the service's __init__ does",
        f"execute: what {method.name} does; its code is beside this file as {_CODE_FILE}",
    ]
    if model.decoupled:
        model.steps.append("execute: send each piece with request.get_response_sender()")


def _tensor(model: MigratedModel, name: str, annotation: ast.expr | None, batchable: bool) -> MigratedTensor:
    """A tensor from a type: scalars are [1], lists of them [-1], arrays what their annotation says."""
    dims: tuple[int, ...] = (1,)
    data_type = ""
    item = annotation
    if isinstance(item, ast.Constant) and isinstance(item.value, str):
        try:
            item = ast.parse(item.value, mode="eval").body
        except (SyntaxError, ValueError):
            item = None
    if isinstance(item, ast.Subscript) and ast.unparse(item.value).rpartition(".")[2].lower() == "list":
        item, dims = item.slice, (1,) if batchable else (-1,)
    text = ast.unparse(item) if item is not None else ""
    data_type = _SCALARS.get(text, "")
    if "ndarray" in text or "Tensor" in text:
        dims, data_type = _array(item, batchable)
        if not data_type:
            model.leave_out(f"{name}: {text}", "the type of its elements is not written: TYPE_FP32 was assumed")
    elif not data_type:
        data_type = "TYPE_STRING"
        model.leave_out(f"{name}: {text or 'no annotation'}", "no tensor: it is bytes here (an image, JSON)")
    return MigratedTensor(name, data_type or "TYPE_FP32", dims)


def _array(annotation: ast.expr | None, batchable: bool) -> tuple[tuple[int, ...], str]:
    """Dims and type from `Annotated[np.ndarray, Shape((-1, 4)), DType("float32")]`."""
    dims, data_type = [-1], ""
    for call in ast.walk(annotation) if annotation is not None else ():
        if not isinstance(call, ast.Call) or not call.args:
            continue
        try:
            value = ast.literal_eval(call.args[0])
        except (ValueError, RecursionError):
            continue
        word = ast.unparse(call.func).rpartition(".")[2]
        if (
            word == "Shape"
            and isinstance(value, tuple | list)
            and all(isinstance(size, int) and size < 2**63 for size in value)
        ):
            sizes = [size if size > 0 else -1 for size in value]
            dims = (sizes[1:] if batchable else sizes) or [1]
        elif word == "DType":
            data_type = DATA_TYPES.get(_NUMPY.get(str(value), ""), "")
    return tuple(dims), data_type
