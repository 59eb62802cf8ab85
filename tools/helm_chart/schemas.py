"""Checks one manifest with the schema of its kind. Needs the packages of `requirements.txt`.

Kinds of Kubernetes: its JSON schemas, the strict ones, which refuse unknown fields. KEDA's and the Prometheus
operator's: models that were made of their resource definitions, and no field that those do not know. KServe's: the
field names and types of its Python SDK and the fields that this requires, with containers and volumes checked as
Kubernetes' own. Of `RedisFailover` no package has a schema: our text of its interface (`redis_failover`), with what is
Kubernetes' in it checked as Kubernetes' own.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from helm_chart import redis_failover

VERSIONS = ("1.27", "1.31", "1.37")
"""Releases of Kubernetes: the oldest that the chart admits, one between, the newest with schemas."""
_MODELS = {
    "keda.sh/v1alpha1": "cloudcoil.models.keda.v1alpha1",
    "monitoring.coreos.com/v1": "cloudcoil.models.prometheus_operator.v1",
}


def faults(manifest: Mapping[str, Any], short: bool = False) -> list[str]:
    """What is wrong with a manifest, in words; empty for a good one and for one that is not checked.

    `short`: with the newest schemas of Kubernetes alone, and no kind that `is_checked` leaves out.
    """
    api: str = manifest["apiVersion"]
    if not is_checked(manifest, short):
        return []
    if api in _MODELS:
        return list(_of_model(manifest, _MODELS[api]))
    versions = VERSIONS[-1:] if short else VERSIONS
    if api == redis_failover.API:
        return list(_of_redis(manifest, versions))
    if api.startswith("serving.kserve.io/"):
        return list(_of_kserve(manifest, versions))
    return list(_of_kubernetes(manifest, versions))


def is_checked(manifest: Mapping[str, Any], short: bool = False) -> bool:
    """`short`: whether its schema is read within a second, which the operators' models are not."""
    return not (short and manifest["apiVersion"] in _MODELS)


def _of_kubernetes(manifest: Mapping[str, Any], versions: Iterable[str]) -> Iterator[str]:
    import kubernetes_validate

    for version in versions:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"Kubernetes {version}: {error.message} at {'.'.join(str(step) for step in error.path)}"
        except (kubernetes_validate.SchemaNotFoundError, kubernetes_validate.InvalidSchemaError) as error:
            yield f"Kubernetes {version}: {error}"


def _of_redis(manifest: Mapping[str, Any], versions: Iterable[str]) -> Iterator[str]:
    wrong = list(redis_failover.of_interface(manifest))
    yield from wrong
    for part in () if wrong else redis_failover.parts(manifest):
        yield from _of_kubernetes(part, versions)


def _of_model(manifest: Mapping[str, Any], module: str) -> Iterator[str]:
    from pydantic import ValidationError

    model = getattr(importlib.import_module(module), manifest["kind"])
    try:
        read = model.model_validate_json(json.dumps(manifest), strict=True)
    except ValidationError as error:
        yield str(error)
        return
    known = read.model_dump(mode="json", by_alias=True, exclude_unset=True)
    yield from _unknown(manifest, known, manifest["kind"])


def _unknown(given: Any, known: Any, where: str) -> Iterator[str]:
    """Fields that were given and that the model dropped."""
    if isinstance(given, dict) and isinstance(known, dict):
        for name, value in given.items():
            if name not in known:
                yield f"{where}.{name}: unknown field"
            else:
                yield from _unknown(value, known[name], f"{where}.{name}")
    elif isinstance(given, list) and isinstance(known, list):
        for number, (one, other) in enumerate(zip(given, known, strict=True)):
            yield from _unknown(one, other, f"{where}[{number}]")


def _kserve_model(name: str) -> Any:
    """A class of `kserve.models`. Its package itself is not imported: that would need a web server and more."""
    if "kserve" not in sys.modules:
        found = importlib.util.find_spec("kserve")
        assert found is not None
        assert found.origin is not None
        place = Path(found.origin).parent
        for package, folder in (("kserve", place), ("kserve.models", place / "models")):
            stand_in = types.ModuleType(package)
            stand_in.__path__ = [str(folder)]
            sys.modules[package] = stand_in
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return getattr(importlib.import_module(f"kserve.models.{module}"), name)


def _of_kserve(manifest: Mapping[str, Any], versions: Iterable[str]) -> Iterator[str]:
    release = manifest["apiVersion"].rpartition("/")[2].capitalize()
    yield from _of_sdk(manifest, f"{release}{manifest['kind']}", manifest["kind"])
    if manifest["kind"] == "InferenceService":  # its pods are made of a runtime
        return
    spec = manifest["spec"]
    pod = {"containers": spec.get("containers", []), "volumes": spec.get("volumes", [])}
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": manifest["metadata"], "spec": pod}
    yield from _of_kubernetes(whole, versions)


_PLAIN = {"str": str, "bool": bool, "int": int, "object": object}


def _of_sdk(value: Any, kind: str, where: str) -> Iterator[str]:
    """`kind` is a type as the SDK writes it: `str`, `list[V1Container]`, `dict(str, str)`, the name of a class."""
    if listed := re.fullmatch(r"list\[(.+)\]", kind):
        if not isinstance(value, list):
            yield f"{where}: no list"
            return
        for number, one in enumerate(value):
            yield from _of_sdk(one, listed[1], f"{where}[{number}]")
    elif kind.startswith("dict("):
        if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
            yield f"{where}: no map of strings"
    elif kind in _PLAIN:
        if not isinstance(value, _PLAIN[kind]):
            yield f"{where}: no {kind}"
    elif kind.startswith(("V1alpha1", "V1beta1")):
        model = _kserve_model(kind)
        types_by_field = {model.attribute_map[name]: one for name, one in model.openapi_types.items()}
        for name, one in value.items():
            if name not in types_by_field:
                yield f"{where}.{name}: unknown field"
            else:
                yield from _of_sdk(one, types_by_field[name], f"{where}.{name}")
        try:  # the class itself knows which fields it needs
            model(**{name: value.get(field) for name, field in model.attribute_map.items()})
        except ValueError as error:
            yield f"{where}: {error}"
    elif not isinstance(value, dict):  # a class of Kubernetes, which `_of_kserve` has checked as a part of a pod
        yield f"{where}: no object"
