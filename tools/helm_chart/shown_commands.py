"""Follows the page about Kubernetes as far as that needs no cluster: `python -m helm_chart` does.

Each `helm upgrade` of the page is `helm template` here, with the page's own `values.yaml` and options; what it renders
is checked by schemas, as the matrix is. What `kubectl` and an InferenceService of the page name has to be rendered.
A page whose text this does not understand is a fault, too: it is said which line, and what was expected there.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from helm_chart import rendering, schemas
from helm_chart.chart_files import GUIDE, ROOT

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MORE = ("--set", "console.enabled=true,kserve.enabled=true")
"""What later sections of the page say that one sets."""
_FILE = "values.yaml"
"""The file that the page shows, and that its commands read."""
_VALUES = f"# {_FILE}\n"
_KINDS = {"deployment": "Deployment", "svc": "Service"}

Manifests = list[dict[str, Any]]


class UnexpectedTextError(Exception):
    """The page has another form than expected: which line, what it says, what was expected."""


@dataclass(frozen=True)
class Upgrade:
    """`helm upgrade RELEASE CHART OPTIONS`, with the page's line; of the options without `--values` and `--wait`."""

    line: int
    text: str
    release: str
    chart: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Followed:
    """What a command of `kubectl` names; `port` is "" where it names none."""

    line: int
    text: str
    kind: str
    name: str
    port: str


@dataclass(frozen=True)
class Shown:
    """What the page shows. `services` are its InferenceServices, with their lines."""

    values: str
    upgrades: tuple[Upgrade, ...]
    followed: tuple[Followed, ...]
    services: tuple[tuple[int, dict[str, Any]], ...]


def faults(short: bool) -> Iterator[str]:
    """What of the page does not hold, in words. `short` as for `schemas.faults`."""
    try:
        shown = read(GUIDE.read_text())
    except UnexpectedTextError as error:
        yield f"{GUIDE.name}:{error}"
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _FILE).write_text(shown.values)
        try:
            for upgrade in shown.upgrades:
                for manifest in _rendered(upgrade, folder):
                    for fault in schemas.faults(manifest, short):
                        named = f"{manifest['kind']} {manifest['metadata']['name']}"
                        yield f"{GUIDE.name}:{upgrade.line}: {upgrade.text}: {named}: {fault}"
            everything = _rendered(shown.upgrades[0], folder, *_MORE)
        except rendering.RefusedError as error:
            yield f"{GUIDE.name}: {error}"
            return
    for followed in shown.followed:
        if not _is_there(followed, everything):
            yield f"{GUIDE.name}:{followed.line}: {followed.text}: the chart makes no such thing"
    for line, service in shown.services:
        yield from (f"{GUIDE.name}:{line}: {fault}" for fault in _of_service(service, everything, short))
    print(f"{GUIDE.name}: {len(shown.upgrades)} commands of Helm, {len(shown.followed)} of kubectl")


# -- what the page says ------------------------------------------------------------------------------------------------


def read(page: str) -> Shown:
    """Raises `UnexpectedTextError` for a page that shows something else than expected."""
    values: list[str] = []
    upgrades: list[Upgrade] = []
    followed: list[Followed] = []
    services: list[tuple[int, dict[str, Any]]] = []
    for block in _FENCE.finditer(page):
        kind, text = block.groups()
        first = page.count("\n", 0, block.start(2)) + 1
        if kind == "yaml":
            if text.startswith(_VALUES):
                values.append(text)
            services += [(first, one) for one in _documents(first, text) if one.get("kind") == "InferenceService"]
        for line, shown in enumerate(text.splitlines() if kind == "console" else (), first):
            command = shown.removeprefix("$ ")
            if shown.startswith("$ helm upgrade "):
                upgrades.append(_upgrade(line, command))
            elif shown.startswith("$ kubectl "):
                followed.append(_followed(line, command))
    if len(values) != 1:
        raise UnexpectedTextError(
            f" {len(values)} blocks of YAML begin with {_VALUES.strip()!r}; expected is one, the values of the commands"
        )
    if not upgrades:
        raise UnexpectedTextError(
            " no block of the kind 'console' has a line '$ helm upgrade RELEASE CHART --values FILE'; expected is one"
        )
    for line, service in services:
        _check_service(line, service)
    return Shown(values[0], tuple(upgrades), tuple(followed), tuple(services))


def _documents(line: int, text: str) -> Manifests:
    try:
        found = [one for one in yaml.safe_load_all(text) if one is not None]
    except yaml.YAMLError as error:
        at = line + (error.problem_mark.line if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark else 0)
        raise UnexpectedTextError(f"{at}: the block is not YAML: {' '.join(str(error).split())}") from None
    for one in found:
        if not isinstance(one, dict):
            raise UnexpectedTextError(f"{line}: the block has {one!r}; expected is a mapping")
    return found


def _words(line: int, command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise UnexpectedTextError(f"{line}: {command!r} is no line of a shell: {error}") from None


def _upgrade(line: int, command: str) -> Upgrade:
    words = [word for word in _words(line, command)[2:] if word not in ("--install", "--wait")]
    expected = "expected is 'helm upgrade [--install] RELEASE CHART ... --values FILE [--wait]'"
    if len(words) < 2 or words[0].startswith("-") or words[1].startswith("-"):
        raise UnexpectedTextError(f"{line}: {command!r} begins with no release and chart; {expected}")
    release, chart, *options = words
    if not (ROOT / chart / "Chart.yaml").is_file():
        raise UnexpectedTextError(f"{line}: {command!r}: {chart} is the folder of no chart; {expected}")
    if options.count("--values") != 1 or options[-1] == "--values":
        raise UnexpectedTextError(f"{line}: {command!r} has not one '--values FILE'; {expected}")
    at = options.index("--values")
    if options[at + 1] != _FILE:
        raise UnexpectedTextError(
            f"{line}: {command!r} reads {options[at + 1]}; expected is {_FILE}, which the page shows"
        )
    return Upgrade(line, command, release, chart, (*options[:at], *options[at + 2 :]))


def _followed(line: int, command: str) -> Followed:
    found = re.search(r"\b(deployment|svc)/(\S+)(?: (\d+))?$", " ".join(_words(line, command)))
    if found is None:
        raise UnexpectedTextError(
            f"{line}: {command!r} names nothing that can be looked for; expected at its end is deployment/NAME, "
            "svc/NAME or svc/NAME PORT"
        )
    return Followed(line, command, found[1], found[2], found[3] or "")


def _check_service(line: int, service: dict[str, Any]) -> None:
    """Raises `UnexpectedTextError` unless it has the fields that `_of_service` compares."""
    for path in ("runtime", "modelFormat.name", "protocolVersion"):
        value: Any = service
        for step in ("spec", "predictor", "model", *path.split(".")):
            value = value.get(step) if isinstance(value, dict) else None
        if not isinstance(value, str):
            raise UnexpectedTextError(
                f"{line}: the InferenceService has {value!r} at spec.predictor.model.{path}; expected is a text"
            )


# -- what holds of it --------------------------------------------------------------------------------------------------


def _rendered(upgrade: Upgrade, folder: str, *more: str) -> Manifests:
    """What an upgrade would send to a cluster. Raises `RefusedError`."""
    values = ("--values", str(Path(folder) / _FILE))
    text = rendering.run("template", upgrade.release, str(ROOT / upgrade.chart), *upgrade.options, *values, *more)
    return [one for one in yaml.safe_load_all(text) if one]


def _is_there(followed: Followed, manifests: Manifests) -> bool:
    wanted = (_KINDS[followed.kind], followed.name)
    named = [one for one in manifests if (one["kind"], one["metadata"]["name"]) == wanted]
    port = followed.port
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
