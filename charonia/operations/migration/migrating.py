"""`charonia migrate`: finds out what a source is, reads it, and writes the models that can be read into a repository,
all of them or none.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from charonia.errors import InvalidArgument

from . import bentoml, kserve, mlserver, torchserve
from .migrated_model import MigratedModel, RefusedModel, config_text
from .skeleton import skeleton


def migrate(source: Path, kind: str, repository: Path | None) -> dict[str, Any]:
    """Read a source and, with a repository, write its models there. Returns the document.

    Raises `InvalidArgument` for a source of which nothing can be read, and for a model that the repository has already.
    """
    if not source.exists():
        raise InvalidArgument(f"'{source}' does not exist")
    kind = kind or kind_of(source)
    parent = repository if repository is not None and repository.is_dir() else None
    with tempfile.TemporaryDirectory(prefix=".charonia-migrate-", dir=parent) as scratch:
        unpacked = Path(scratch) / "archive"
        unpacked.mkdir()
        found = read(source, kind, unpacked)
        models = [one for one in found if isinstance(one, MigratedModel)]
        refused = [one for one in found if isinstance(one, RefusedModel)]
        if not models and len(refused) == 1:
            raise InvalidArgument(str(refused[0]))
        names = [model.name for model in models]
        if len(set(names)) != len(names):
            raise InvalidArgument(f"several models of '{source}' would be called the same: {', '.join(sorted(names))}")
        if repository is not None and models:
            unwritten = _write(models, repository)
            models = [model for model in models if model.name not in unwritten]
            refused += unwritten.values()
        return {
            "source": str(source),
            "kind": kind,
            "repository": str(repository) if repository is not None else "",
            "models": [_document(model) for model in models],
            "refused": [{"file": one.file, "problem": one.problem} for one in refused],
        }


def kind_of(source: Path) -> str:
    """What a source is, from its files. Raises `InvalidArgument`."""
    if source.is_file():
        if source.suffix in (".mar", ".zip", ".tgz") or source.name.endswith(".tar.gz"):
            return "torchserve"
        if source.suffix == ".json":
            return "mlserver"
        if source.suffix == ".py" or source.name.startswith("bentofile"):
            return "bentoml"
        if source.suffix in (".yaml", ".yml"):
            return "kserve"
    elif (source / "bentofile.yaml").is_file() or (source / "service.py").is_file():
        return "bentoml"
    elif (source / mlserver.FILE).is_file() or any(source.glob(f"*/{mlserver.FILE}")):
        return "mlserver"
    raise InvalidArgument(f"what '{source}' is cannot be seen from its files: say it with --from")


def read(source: Path, kind: str, unpacked: Path) -> Sequence[MigratedModel | RefusedModel]:
    """The models of a source. An archive is unpacked into an empty directory. Raises `InvalidArgument`."""
    if kind == "torchserve":
        return torchserve.read(source, unpacked)
    return {"mlserver": mlserver.read, "bentoml": bentoml.read, "kserve": kserve.read}[kind](source)


def _write(models: list[MigratedModel], repository: Path) -> dict[str, RefusedModel]:
    """Write the models; return those whose files cannot be copied, by name."""
    repository.mkdir(parents=True, exist_ok=True)
    taken = [model.name for model in models if os.path.lexists(repository / model.name)]
    if taken:
        raise InvalidArgument(f"'{repository}' has '{taken[0]}' already: nothing was written")
    unwritten = {}
    with tempfile.TemporaryDirectory(prefix=".charonia-migrate-", dir=repository) as place:
        for model in models:
            try:
                _write_model(model, Path(place) / model.name)
            except OSError as error:
                unwritten[model.name] = RefusedModel(model.source, f"'{model.name}' cannot be written: {error}")
        for model in models:
            if model.name not in unwritten:
                os.rename(Path(place) / model.name, repository / model.name)
    return unwritten


def _write_model(model: MigratedModel, directory: Path) -> None:
    version = directory / str(model.version)
    version.mkdir(parents=True)
    (directory / "config.pbtxt").write_text(config_text(model), encoding="utf-8")
    if model.backend == "python":
        (version / "model.py").write_text(skeleton(model), encoding="utf-8")
    for name, content in sorted(model.files.items()):
        target = version / _placed(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            shutil.copyfile(content, target)


def _placed(name: str) -> str:
    """Where a file goes in the version's directory: the skeleton is the `model.py`."""
    return "original_model.py" if name == "model.py" else name


def _document(model: MigratedModel) -> dict[str, Any]:
    written = ["config.pbtxt"]
    if model.backend == "python":
        written.append(f"{model.version}/model.py")
    written += [f"{model.version}/{_placed(name)}" for name in sorted(model.files)]
    return {
        "model": model.name,
        "from": model.source,
        "backend": model.backend,
        "config": config_text(model),
        "files": written,
        "fill_in": model.steps,
        "unmapped": [{"field": one.field, "why": one.why} for one in model.unmapped],
    }
