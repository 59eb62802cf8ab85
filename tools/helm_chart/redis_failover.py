"""Checks a `RedisFailover` of Spotahome's Redis operator, by our text of its published interface.

No package of the registries has its resource definition (charts/redisoperator/crds of the operator, the same in 1.2.4
and 1.3.0), so its fields and their types are written down here, as `protos/` does for the wire. What is a part of a pod
or a volume claim is given back as manifests of Kubernetes, for Kubernetes' own schemas (`schemas`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

API = "databases.spotahome.com/v1"

_TEXT, _SWITCH, _OBJECT = {"type": "string"}, {"type": "boolean"}, {"type": "object"}
_NUMBER = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
_TEXTS, _OBJECTS = {"type": "array", "items": _TEXT}, {"type": "array", "items": _OBJECT}
_MAP = {"type": "object", "additionalProperties": _TEXT}


def _fields(**known: Any) -> dict[str, Any]:
    return {"type": "object", "properties": known, "additionalProperties": False}


_EXPORTER = _fields(
    enabled=_SWITCH,
    image=_TEXT,
    imagePullPolicy=_TEXT,
    containerSecurityContext=_OBJECT,
    args=_TEXTS,
    env=_OBJECTS,
    resources=_OBJECT,
)
_OF_BOTH = {
    "image": _TEXT,
    "imagePullPolicy": _TEXT,
    "replicas": _NUMBER,
    "resources": _OBJECT,
    "customConfig": _TEXTS,
    "command": _TEXTS,
    "affinity": _OBJECT,
    "securityContext": _OBJECT,
    "containerSecurityContext": _OBJECT,
    "imagePullSecrets": _OBJECTS,
    "tolerations": _OBJECTS,
    "topologySpreadConstraints": _OBJECTS,
    "nodeSelector": _MAP,
    "podAnnotations": _MAP,
    "serviceAnnotations": _MAP,
    "initContainers": _OBJECTS,
    "extraContainers": _OBJECTS,
    "exporter": _EXPORTER,
    "hostNetwork": _SWITCH,
    "dnsPolicy": _TEXT,
    "priorityClassName": _TEXT,
    "serviceAccountName": _TEXT,
    "extraVolumes": _OBJECTS,
    "extraVolumeMounts": _OBJECTS,
}
_CLAIM = _fields(
    apiVersion=_TEXT,
    kind=_TEXT,
    metadata=_fields(name=_TEXT, labels=_MAP, annotations=_MAP),
    spec=_OBJECT,
    status=_OBJECT,
)
_REDIS = _fields(
    **_OF_BOTH,
    port=_NUMBER,
    customCommandRenames={"type": "array", "items": _fields(**{"from": _TEXT, "to": _TEXT})},
    shutdownConfigMap=_TEXT,
    storage=_fields(keepAfterDeletion=_SWITCH, emptyDir=_OBJECT, persistentVolumeClaim=_CLAIM),
    terminationGracePeriod={"type": "integer"},
)
_SENTINEL = _fields(**_OF_BOTH, configCopy=_fields(containerSecurityContext=_OBJECT))
_SPEC = _fields(
    redis=_REDIS,
    sentinel=_SENTINEL,
    auth=_fields(secretPath=_TEXT),
    labelWhitelist=_TEXTS,
    bootstrapNode=_fields(host=_TEXT, port=_TEXT, allowSentinels=_SWITCH),
)
SCHEMA = {**_fields(apiVersion={"const": API}, kind=_TEXT, metadata=_OBJECT, spec=_SPEC), "required": ["spec"]}

_OF_POD = (
    "affinity",
    "securityContext",
    "imagePullSecrets",
    "tolerations",
    "topologySpreadConstraints",
    "nodeSelector",
    "initContainers",
    "hostNetwork",
    "dnsPolicy",
    "priorityClassName",
    "serviceAccountName",
)
_OF_CONTAINER = {
    "image": "image",
    "imagePullPolicy": "imagePullPolicy",
    "resources": "resources",
    "command": "command",
    "containerSecurityContext": "securityContext",
    "extraVolumeMounts": "volumeMounts",
}


def of_interface(manifest: Mapping[str, Any]) -> Iterator[str]:
    """What the operator's own fields have wrong, in words."""
    from jsonschema import Draft202012Validator

    for error in Draft202012Validator(SCHEMA).iter_errors(manifest):
        yield f"RedisFailover: {error.message} at {'.'.join(str(step) for step in error.path)}"


def parts(manifest: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What the operator makes of a manifest without faults, as far as its fields are those of Kubernetes."""
    metadata, spec = manifest["metadata"], manifest["spec"]
    for part in ("redis", "sentinel"):
        settings = spec.get(part, {})
        main = {"name": part} | {to: settings[name] for name, to in _OF_CONTAINER.items() if name in settings}
        pod = {name: settings[name] for name in _OF_POD if name in settings}
        pod["containers"] = [main, *settings.get("extraContainers", [])]
        pod["volumes"] = settings.get("extraVolumes", [])
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}
    claim = spec.get("redis", {}).get("storage", {}).get("persistentVolumeClaim")
    if claim is not None:
        yield {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {}, "spec": {}} | claim
