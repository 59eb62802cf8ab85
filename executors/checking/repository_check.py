"""Checks a repository, model by model, and writes corrections if asked to.

A model is refused exactly when an executor of this machine would refuse it: `offline_models` loads it with the
executor's code. Faults behind the first are found by correcting the text in memory, and by trying the other rules.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from charonia.errors import CharoniaError, InvalidArgument
from charonia.models.names import can_be_model
from executors.backends.python.model_environments import ENVIRONMENT
from executors.backends.registry import BackendRegistry
from executors.configuration.declarations import SHIPPED
from executors.configuration.known_parameters import unknown_parameters
from executors.repository.files import is_hidden, read_file
from executors.repository.model_directory import CONFIG_FILE, MAX_CONFIG_BYTES, ModelDirectory, parse_config, version_of
from executors.repository.model_repository import ModelRepository

from . import corrections
from .broken_rules import further_problems
from .explanations import Explanation, explain
from .faults import Fault, Move, Note, Place, TextEdit
from .offline_models import OfflineModels

_MAX_CORRECTIONS = 200
"""In one model's text: each is one misspelt word."""
_MAX_PATH = 4096
"""Linux has no longer paths."""
_MAX_PASSES = 5
"""A corrected model may let a fault of an ensemble come to light, and so on."""

Progress = Callable[[int, int], None]
"""Called with the number of checked models, and of all."""


@dataclass(slots=True)
class RepositoryReport:
    """What a check found and did. `diffs` are of written configurations, `fixed` says in words what was changed."""

    repository: str
    models: int = 0
    faults: list[Fault] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    diffs: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Examined:
    """The faults of one model, and its configuration's text as it is and with all corrections."""

    path: Path
    written: bytes | None
    corrected: str
    faults: list[Fault] = field(default_factory=list)


async def check_repository(
    path: Path,
    *,
    gpus: int,
    assumed_gpus: bool = False,
    fix: bool = False,
    on_progress: Progress | None = None,
    backend_directory: str = "",
) -> RepositoryReport:
    """Check all models of a local repository for a machine with so many GPUs, this one unless they are assumed.

    With `fix`, write the corrections and check again. `backend_directory` has python-based backends.

    Raises `StartupError` for a path that is no directory.
    """
    machine = (gpus, assumed_gpus, backend_directory)
    report = await _pass(ModelRepository([path]), path, machine, fix, on_progress)
    passes = 1
    while fix and report.fixed and passes < _MAX_PASSES:
        again = await _pass(ModelRepository([path]), path, machine, fix, on_progress)
        done = bool(again.fixed)
        again.diffs, again.fixed = report.diffs + again.diffs, report.fixed + again.fixed
        report, passes = again, passes + 1
        if not done:
            break
    return report


async def _pass(
    repository: ModelRepository, path: Path, machine: tuple[int, bool, str], fix: bool, on_progress: Progress | None
) -> RepositoryReport:
    report = RepositoryReport(str(path))
    try:
        models = OfflineModels(repository, *machine)
        report.models = len(models.directories)
        report.notes += _of_repository(path)
        for done, directory in enumerate(models.directories.values(), 1):
            examined = await _examine(models, directory, report.notes)
            report.faults += examined.faults
            if fix and any(fault.correction for fault in examined.faults):
                try:
                    _write(examined, path, report)
                except InvalidArgument as error:  # the others are corrected all the same, and what was is told
                    report.notes.append(Note(directory.name, f"not corrected: {error}"))
            if on_progress is not None:
                on_progress(done, report.models)
    finally:
        repository.close()
    return report


def _of_repository(path: Path) -> list[Note]:
    entries = [entry for entry in sorted(path.iterdir()) if not is_hidden(entry.name)]
    folders = [entry.name for entry in entries if entry.is_dir()]
    files = [entry for entry in entries if entry.is_file()]
    notes = []
    for file in files:
        if file.name == CONFIG_FILE and (not folders or any(version_of(name) is not None for name in folders)):
            parent = path.resolve().parent
            what = f"lies here: this is one model's directory, check its repository, '{parent}'"
            notes.append(Note("", f"'{CONFIG_FILE}' {what}"))
        elif file.suffix in (".onnx", ".py", ".pbtxt", ".pt", ".pt2", ".plan"):
            notes.append(Note("", f"'{file.name}' is no directory, and no part of the repository"))
    return notes + [Note("", f"'{name}' cannot be a model's name") for name in folders if not can_be_model(name)]


async def _examine(models: OfflineModels, directory: ModelDirectory, notes: list[Note]) -> _Examined:
    config_path = directory.path / CONFIG_FILE
    try:
        written = read_file(config_path, MAX_CONFIG_BYTES)
    except OSError:
        written = None
    text = (written or b"").decode("utf-8", "replace")
    examined = _Examined(config_path, written, text)
    refusal = await _refusal_as_is(models, directory)
    here = directory
    first = refusal
    while refusal is not None and len(examined.faults) < _MAX_CORRECTIONS:
        if first is refusal and (completing := models.completed_by(here, refusal.message)):
            notes.append(Note(directory.name, f"not decided: {completing} may complete this: {refusal}"))
            return examined
        fault = await _fault(models, here, refusal, examined.corrected)
        examined.faults.append(fault)
        if not isinstance(fault.correction, TextEdit):
            break
        examined.corrected = fault.correction.apply(examined.corrected)
        here, refusal = await _attempt(models, directory, examined.corrected)
    with contextlib.suppress(CharoniaError):
        final = parse_config(CONFIG_FILE, examined.corrected.encode())
        notes += [Note(directory.name, sentence) for sentence in unknown_parameters(final)]
    if first is not None:
        _add_further(models, here, examined)
    else:
        notes += _undecided(models, directory)
    return examined


async def _refusal_as_is(models: OfflineModels, directory: ModelDirectory) -> CharoniaError | None:
    try:
        await models.load(directory.key, None)
    except CharoniaError as error:
        return error
    return None


async def _attempt(
    models: OfflineModels, directory: ModelDirectory, text: str
) -> tuple[ModelDirectory, CharoniaError | None]:
    """The directory with another text of its configuration, and why it would be refused."""
    try:
        here = directory.with_config(parse_config(CONFIG_FILE, text.encode()))
    except CharoniaError as error:
        return directory, error
    try:
        await models.attempt(here)
    except CharoniaError as error:
        return here, error
    return here, None


async def _fault(models: OfflineModels, here: ModelDirectory, error: CharoniaError, text: str) -> Fault:
    problem = error.message
    correction: TextEdit | Move | None = None
    if not here.versions and ("must specify 'platform'" in problem or "at least one version" in problem):
        correction = corrections.version_directory(here.path)
    if correction is None:
        graph = None
        if "the model expects" in problem and here.config is not None:
            graph = await models.graph(here)
        correction = corrections.in_text(problem, text, graph)
    explanation = explain(problem, text)
    file, place = _code_place(here, problem)
    if not file and not explanation.place.field and (file := _model_file(here, problem)):
        explanation = Explanation(Place(), "a file that its backend can load", "the model's file, exported again")
    elif file:
        explanation = Explanation(
            place, "a file with the class TritonPythonModel", "the class, see docs/howto/python-models.md"
        )
    instead = explanation.instead
    if isinstance(correction, TextEdit):
        instead = correction.replacement
    elif isinstance(correction, Move):
        instead = f"the file at 1/{correction.target.name}"
    return Fault(
        here.name,
        file or f"{here.name}/{CONFIG_FILE}",
        explanation.place,
        problem,
        explanation.expected,
        " ".join(instead.split()),
        correction,
    )


def _code_place(here: ModelDirectory, problem: str) -> tuple[str, Place]:
    """The file and line that an error about a model's code names, relative to the repository; "" for other errors."""
    start = problem.find(str(here.path))
    if "Python model file" not in problem and not problem.startswith(str(here.path)):
        return "", Place()
    file, _, rest = problem[start:].partition(".py")
    line = rest[1:].partition(":")[0]
    return str(Path(file + ".py").relative_to(here.path.parent)), Place(int(line) if line.isdigit() else 0)


def _model_file(here: ModelDirectory, problem: str) -> str:
    """The file of a version that an error of a backend names, relative to the repository; "" when it names none."""
    for version in here.versions:
        directory = here.path / str(version)
        before = f"{directory}{os.sep}"
        _, _, rest = problem.partition(before)
        named = [*_beginnings(rest), *re.findall(r"'([^'\n]+)'", problem)]
        for name in (name for name in named if name and not name.startswith(os.sep)):
            try:
                if (directory / name).is_file():
                    return str((directory / name).relative_to(here.path.parent))
            except (OSError, ValueError):  # too long for a name
                continue
    return ""


def _beginnings(text: str) -> Iterator[str]:
    """Where a file's name may end that an error's text begins with, the longest first: names may have spaces."""
    line = text[:_MAX_PATH].partition("\n")[0]
    yield line
    for end in reversed([match.start() for match in re.finditer(r"[\s:;,.'\")]", line)]):
        yield line[:end]


def _add_further(models: OfflineModels, here: ModelDirectory, examined: _Examined) -> None:
    """Add what else the text, corrected as far as that goes, breaks."""
    try:
        written = parse_config(CONFIG_FILE, examined.corrected.encode())
    except CharoniaError:
        return
    known = {fault.problem for fault in examined.faults}
    for problem in further_problems(here, written, models.gpus):
        if problem in known or "must specify 'platform' or 'backend'" in problem:
            continue
        explanation = explain(problem, examined.corrected)
        examined.faults.append(
            Fault(here.name, f"{here.name}/{CONFIG_FILE}", explanation.place, problem, explanation.expected,
                  explanation.instead)
        )  # fmt: skip


def _undecided(models: OfflineModels, directory: ModelDirectory) -> list[Note]:
    config = directory.required_config()
    notes = []
    if config.backend == "python":
        notes.append("its code was parsed, not run: what it does at load is not checked")
        if ENVIRONMENT in config.parameters:
            notes.append(f"its environment ({ENVIRONMENT}) was not unpacked")
    elif config.backend == "onnxruntime" and not BackendRegistry().has("onnxruntime"):
        notes.append("onnxruntime is not installed: its file was not opened")
    elif config.backend and config.backend != "onnxruntime" and not models.backends.opens(config.backend):
        notes.append(f"its file was not opened: only the backend '{config.backend}' can do that")
    elif config.backend in SHIPPED and models.backends.opens(config.backend):
        missing = f"the library of {config.backend} is not installed here"
        open_question = (
            "what its library makes of it is not checked" if models.backends.has(config.backend) else missing
        )
        notes.append(f"its file was read, not loaded: {open_question}")
    return [Note(directory.name, note) for note in notes]


def _write(examined: _Examined, root: Path, report: RepositoryReport) -> None:
    """Write a model's corrections. The configuration as it was stays beside it, as `config.pbtxt~`.

    Raises `InvalidArgument` when a file changed meanwhile or cannot be written.
    """
    name = str(examined.path.relative_to(root))
    try:
        if not examined.path.parent.resolve().is_relative_to(root.resolve()):
            raise InvalidArgument(f"'{name}' lies outside the repository: it was not written")
        if any(isinstance(fault.correction, TextEdit) for fault in examined.faults):
            _write_text(examined, name, report)
        for fault in examined.faults:
            if isinstance(move := fault.correction, Move):
                move.target.parent.mkdir()
                os.rename(move.source, move.target)
                report.fixed.append(f"moved {move.source.relative_to(root)} to {move.target.relative_to(root)}")
    except OSError as error:
        raise InvalidArgument(f"'{name}' cannot be corrected: {error}") from None


def _write_text(examined: _Examined, name: str, report: RepositoryReport) -> None:
    written, corrected = examined.written or b"", examined.corrected
    changed = f"'{name}' is a link or was changed meanwhile: it was not written"
    if examined.path.is_symlink() or read_file(examined.path) != written:
        raise InvalidArgument(changed)
    backup = _free(examined.path)
    new = examined.path.with_name(f".{CONFIG_FILE}.new")
    try:
        new.write_bytes(corrected.encode())
        new.chmod(examined.path.stat().st_mode & 0o777)
        backup.write_bytes(written)
        if read_file(examined.path) != written:
            backup.unlink()
            raise InvalidArgument(changed)
        os.replace(new, examined.path)
    finally:
        new.unlink(missing_ok=True)
    report.fixed.append(f"corrected {name}; as it was: {backup.parent.name}/{backup.name}")
    # lines as protobuf and editors count them: `splitlines` knows more ends of lines
    before, after = (list(io.StringIO(text, newline="\n")) for text in (written.decode(), corrected))
    lines = difflib.unified_diff(before, after, f"{name} (as it was)", f"{name} (corrected)")
    report.diffs.append("".join(line if line.endswith("\n") else line + "\n" for line in lines))


def _free(path: Path) -> Path:
    """A name for a backup, which a repository takes for an editor's."""
    number = 1
    while (backup := path.with_name(f"{path.name}.{number}~" if number > 1 else f"{path.name}~")).exists():
        number += 1
    return backup
