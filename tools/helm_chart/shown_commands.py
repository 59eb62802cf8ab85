"""Follows the page about Kubernetes as far as that needs no cluster: `python -m helm_chart` does.

Each `helm upgrade` of the page is `helm template` here, with the page's own `values.yaml` and options; what it renders
is checked by schemas, as the matrix is. What `kubectl` and an InferenceService of the page name has to be rendered.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from helm_chart import rendering, schemas
from helm_chart.chart_files import GUIDE, ROOT

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MORE = ("--set", "console.enabled=true,kserve.enabled=true")
"""What later sections of the page say that one sets."""

Manifests = list[dict[str, Any]]


def faults(short: bool) -> Iterator[str]:
    """What of the page does not hold, in words. `short` as for `schemas.faults`."""
    blocks = _FENCE.findall(GUIDE.read_text())
    values = [text for kind, text in blocks if kind == "yaml" and text.startswith("# values.yaml\n")]
    shown = "".join(text for kind, text in blocks if kind == "console")
    commands = [line[2:] for line in shown.splitlines() if line.startswith("$ ")]
    upgrades = [command for command in commands if command.startswith("helm upgrade ")]
    if len(values) != 1 or not upgrades:
        yield f"{GUIDE.name}: shows {len(values)} files values.yaml, {len(upgrades)} commands of Helm"
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "values.yaml").write_text(values[0])
        try:
            for command in upgrades:
                for manifest in _rendered(command, folder):
                    for fault in schemas.faults(manifest, short):
                        yield f"{GUIDE.name}: {command}: {manifest['kind']} {manifest['metadata']['name']}: {fault}"
            everything = _rendered(upgrades[0], folder, *_MORE)
        except rendering.RefusedError as error:
            yield f"{GUIDE.name}: {error}"
            return
    followed = [command for command in commands if command.startswith("kubectl ")]
    for command in followed:
        if not _is_there(command, everything):
            yield f"{GUIDE.name}: {command}: the chart makes no such thing"
    services = [one for kind, text in blocks if kind == "yaml" for one in yaml.safe_load_all(text)]
    for service in (one for one in services if one.get("kind") == "InferenceService"):
        yield from (f"{GUIDE.name}: {fault}" for fault in _of_service(service, everything, short))
    print(f"{GUIDE.name}: {len(upgrades)} commands of Helm, {len(followed)} of kubectl")


def _rendered(command: str, folder: str, *more: str) -> Manifests:
    """What an upgrade would send to a cluster. Raises `RefusedError`."""
    words = shlex.split(command)
    release = next(word for word in words[2:] if not word.startswith("--"))
    chart = words.index(release) + 1
    options = [word for word in words[chart + 1 :] if word != "--wait"]
    options[options.index("--values") + 1] = str(Path(folder) / "values.yaml")
    text = rendering.run("template", release, str(ROOT / words[chart]), *options, *more)
    return [one for one in yaml.safe_load_all(text) if one]


def _is_there(command: str, manifests: Manifests) -> bool:
    """Of `rollout status deployment/NAME` and `port-forward svc/NAME PORT`."""
    found = re.search(r"\b(deployment|svc)/(\S+)(?: (\d+))?$", command)
    if found is None:
        return False
    kind, name, port = found.groups()
    wanted = {"deployment": "Deployment", "svc": "Service"}[kind]
    named = [one for one in manifests if (one["kind"], one["metadata"]["name"]) == (wanted, name)]
    return bool(named) and (not port or int(port) in [one["port"] for one in named[0]["spec"]["ports"]])


def _of_service(service: dict[str, Any], manifests: Manifests, short: bool) -> Iterator[str]:
    yield from schemas.faults(service, short)
    model = service["spec"]["predictor"]["model"]
    runtimes = {one["metadata"]["name"]: one["spec"] for one in manifests if one["kind"] == "ClusterServingRuntime"}
    if (runtime := runtimes.get(model["runtime"])) is None:
        yield f"there is no runtime {model['runtime']}"
        return
    if model["modelFormat"]["name"] not in [one["name"] for one in runtime["supportedModelFormats"]]:
        yield f"the runtime has no format {model['modelFormat']['name']}"
    if model["protocolVersion"] not in runtime["protocolVersions"]:
        yield f"the runtime has no protocol {model['protocolVersion']}"
