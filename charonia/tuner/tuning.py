"""`charonia tune`: goes through the models, asks the search, measures, confirms the winner, and writes reports."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from charonia.analyzer.benching import interrupted_by_signals, load_average
from charonia.errors import InvalidArgument
from charonia.models.ensemble import composing_models
from protos.model_config_pb2 import ModelConfig

from . import checkpoint, tune_page, tune_report, verdict
from .checkpoint import CONFIG, TRIAL, TURN, Checkpoint
from .configuration_search import BruteSearch, Point, QuickSearch, Search
from .knobs import Circumstances, Dimension, Settings, applied, config_of, dimensions, identity
from .trial_measurement import SideBySide, Turn, loaded_configs, measure, running
from .trial_server import CONFIG as CONFIG_FILE
from .trial_server import ModelCopies, find_model, written_config
from .tune_options import BRUTE, MOST_POINTS, TuneOptions, parsed
from .verdict import Score


def run(words: Sequence[str], _environment: Mapping[str, str]) -> int:
    """The command line `words`, the command first; the exit code: 1 when nothing keeps to the limits, 2 for options
    that cannot be.

    Raises `SystemExit` for usage and help, `KeyboardInterrupt` after Ctrl-C with the reports written so far, and the
    `CharoniaError` that makes a run impossible. What a configuration does is no error of the run.
    """
    try:
        options = parsed(words)
    except InvalidArgument as error:
        _say(str(error))
        return 2
    output = Path(options.words.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"'{output}' cannot be made: {error.strerror}") from None
    if options.words.fresh:
        (output / "checkpoint.jsonl").unlink(missing_ok=True)
    models = options.words.models
    groups = [tuple(models)] if options.words.together else [(model,) for model in models]
    described: dict[str, Any] = {
        "began": datetime.now(UTC).isoformat(timespec="seconds"), "words": list(words[1:]), "groups": [],
        "machine": {"cores": _cores(), "load_average": [load_average()]},
    }  # fmt: skip
    was_interrupted = False
    with interrupted_by_signals():
        for targets in groups:
            with tempfile.TemporaryDirectory(prefix="charonia-tune-") as root:
                tuned = GroupTuning(options, targets, output / "checkpoint.jsonl", Path(root))
                found = tuned.result()
            described["groups"].append(found)
            was_interrupted = found["interrupted"]
            described["machine"]["load_average"].append(load_average())
            _write_reports(output, described)
            if was_interrupted:
                break
            _write_configs(options, output, found)
    sys.stdout.write((json.dumps(described) if options.words.json else tune_report.text(described)) + "\n")
    if was_interrupted:
        _say("interrupted: the same command goes on from here")
        raise KeyboardInterrupt
    _say(f"reports and configurations are in '{output}'")
    return 0 if all(found["winner"] for found in described["groups"]) else 1


def _write_reports(output: Path, described: Mapping[str, Any]) -> None:
    _write(output / "report.json", json.dumps(described, indent=1) + "\n")
    _write(output / "report.csv", tune_report.csv_text(described))
    _write(output / "report.html", tune_page.page(described))


def _write_configs(options: TuneOptions, output: Path, found: Mapping[str, Any]) -> None:
    for model, text in found["configs"].items():
        (output / model).mkdir(exist_ok=True)
        _write(output / model / CONFIG_FILE, text)
        if options.words.write and found["changed"].get(model):
            place = find_model(options.words.model_repository, model)
            backup = _keep(place / CONFIG_FILE)
            _write(place / CONFIG_FILE, text)
            _say(f"'{place / CONFIG_FILE}' is the winner's{f', {backup} the one before' if backup else ''}")


def _keep(path: Path) -> str:
    """Copies a file beside itself, as `charonia check --fix` does; the copy's name, empty without a file."""
    if not path.exists():
        return ""
    number, backup = 1, path.with_name(f"{path.name}~")
    while backup.exists():
        number += 1
        backup = path.with_name(f"{path.name}.{number}~")
    try:
        shutil.copy2(path, backup)
    except OSError as error:
        raise InvalidArgument(f"'{backup}' cannot be written: {error.strerror}") from None
    return backup.name


def _write(path: Path, text: str) -> None:
    """The whole file or, if that fails, the one before."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise InvalidArgument(f"'{path}' cannot be written: {error.strerror}") from None


@dataclass(slots=True)
class _Trials:
    """What was measured of a group, by name: the observation, and the values."""

    observations: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, Settings] = field(default_factory=dict)


class GroupTuning:
    """Models that are tuned on one server: one, or several with `--together`. `targets` get the load."""

    def __init__(self, options: TuneOptions, targets: Sequence[str], path: Path, root: Path) -> None:
        """Raises `NotFound` and `InvalidArgument` for models that cannot be tuned."""
        self._options, self._targets = options, tuple(targets)
        repositories = options.words.model_repository
        self._tuned, ensembles = _parts(repositories, targets)
        self._loaded = list(dict.fromkeys([*self._tuned, *ensembles, *options.words.others]))
        sources = [(model, find_model(repositories, model)) for model in self._loaded]
        marks = [checkpoint.file_mark(Path(text)) for text in _files(options, targets)]
        self._checkpoint = Checkpoint(path, checkpoint.key_of(sources, [*options.measured(targets), *marks]))
        self._root, self._copies = root, ModelCopies(repositories, self._loaded, root)
        self._written = {model: self._copies.written(model) for model in self._tuned}
        self._as_loaded: dict[str, ModelConfig] = {}
        self._dimensions: list[Dimension] = []
        self._notes: list[str] = []
        self._trials = _Trials()
        self._base = ""
        self._measured, self._spent_s = 0, 0.0

    def result(self) -> dict[str, Any]:
        """Tunes; the group's part of the report. An interrupt is in it: what was measured until then counts."""
        turns: list[dict[str, dict[str, Any]]] = []
        interrupted = False
        try:
            self._prepare()
            self._search()
            try:
                turns = self._confirm()
            except (OSError, InvalidArgument) as error:  # a full disk mostly: each finalist has a copy of the models
                self._notes.append(f"not measured in turns, single measurements decide: {error}")
                _say(self._notes[-1])
        except KeyboardInterrupt:
            if not self._trials.observations:
                raise
            interrupted = True
        return self._report(turns, interrupted)

    # -- what there is to tune -----------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        known = self._checkpoint.find(CONFIG, "loaded")
        if known is None:
            configs = loaded_configs(self._options, self._copies, self._loaded)
            known = {model: text_format.MessageToString(configs[model]) for model in self._tuned}
            self._checkpoint.add(CONFIG, "loaded", known)
        self._as_loaded = {model: config_of(text, model) for model, text in known.items()}
        in_flight = max(self._options.levels) * self._options.words.batch if not self._options.is_open else 0
        around = Circumstances(_cores(), int(in_flight), self._options.words.batch)
        for model in self._tuned:
            found, notes = dimensions(model, self._as_loaded[model], self._options.values, around)
            self._dimensions += found
            self._notes += notes
        if not self._dimensions:
            raise InvalidArgument(f"nothing to tune of {', '.join(self._tuned)}: no knob has another value")
        if others := self._checkpoint.others:
            _say(f"{others} measurements of other models, options or machines are in the checkpoint, and are not used")
        for note in self._notes:
            _say(note)

    def _settings(self, point: Point) -> Settings:
        return {(d.model, d.knob): d.values[at] for d, at in zip(self._dimensions, point, strict=True)}

    def _configs(self, settings: Settings) -> dict[str, ModelConfig]:
        return {
            model: applied(
                self._written[model], self._as_loaded[model],
                {knob: value for (owner, knob), value in settings.items() if owner == model},
            )
            for model in self._tuned
        }  # fmt: skip

    # -- search --------------------------------------------------------------------------------------------------------

    def _search(self) -> None:
        options, words = self._options, self._options.words
        axes = [dimension.axis for dimension in self._dimensions]
        start = tuple(dimension.start for dimension in self._dimensions)
        search: Search
        if words.search == BRUTE:
            search = BruteSearch(axes, start)
            if search.left() > MOST_POINTS and not words.max_configurations:
                raise InvalidArgument(
                    f"{search.left()} combinations: name fewer values, use --search quick, or add --max-configurations"
                )
        else:
            search = QuickSearch(axes, start, options.gain)
        asked: set[str] = set()
        while (point := search.point) is not None:
            settings = self._settings(point)
            name = _name(self._configs(settings))
            if name not in asked and words.max_configurations and len(asked) >= words.max_configurations:
                break
            asked.add(name)
            self._base = self._base or name
            if name not in self._trials.observations:
                self._trials.settings[name] = settings
                known = self._known(TRIAL, name)
                if known is None:
                    known = self._observed(TRIAL, name, settings, search.left(), self._measure)
                else:
                    self._tell(name, known, search.left(), "known")
                self._trials.observations[name] = known
            search.observe(verdict.score_of(self._trials.observations[name], options.aim))

    def _measure(self, configs: Mapping[str, str]) -> dict[str, Any]:
        return measure(self._options, self._copies, self._targets, self._loaded, configs)

    def _known(self, kind: str, name: str) -> dict[str, Any] | None:
        """What the checkpoint has of a configuration, unless it failed: that may have been the machine's doing."""
        found = self._checkpoint.find(kind, name)
        if found is None or verdict.has_failed(verdict.score_of(found["observation"], self._options.aim)):
            return None
        return dict(found["observation"])

    def _observed(
        self,
        kind: str,
        name: str,
        settings: Settings,
        left: int,
        measured: Callable[[Mapping[str, str]], dict[str, Any]],
    ) -> dict[str, Any]:
        """The observation of a configuration, measured and put into the checkpoint."""
        record = name.rpartition(":")[2]
        configs = {model: _text(config) for model, config in self._configs(settings).items()}
        began_s = time.monotonic()
        found = measured(configs)
        self._measured, self._spent_s = self._measured + 1, self._spent_s + time.monotonic() - began_s
        shown = {f"{model} {knob}": value for (model, knob), value in settings.items()}
        self._checkpoint.add(kind, name, {"settings": shown, "observation": found})
        self._tell(record, found, left, "turn" if kind == TURN else "")
        return found

    def _tell(self, record: str, observation: Mapping[str, Any], left: int, word: str) -> None:
        settings = tune_report.shown_settings(self._trials.settings[record], self._trials.settings[self._base])
        text = tune_report.figures_text(observation, self._options.aim)
        left = max(0, left - 1)
        if word != "turn":
            left_s = (left + self._options.words.rounds * (self._options.words.finalists + 1)) * self._mean_s()
        else:
            left_s = left * self._mean_s()
        place = [str(len(self._trials.settings)), *([word] if word else [])]
        ahead = f"{left} more planned"
        ahead += f", about {_duration(left_s)}" if self._measured else ""
        _say(f"{', '.join(self._targets)} [{', '.join(place)}; {ahead}] {settings}: {text}")

    def _mean_s(self) -> float:
        return self._spent_s / self._measured if self._measured else 0.0

    def _confirm(self) -> list[dict[str, dict[str, Any]]]:
        """The best ones and the one as written, measured in turns, so that all have the same machine.

        Their servers run side by side, idle but for the one whose turn it is: turns follow one another within seconds.
        They need not have looked better than the one as written: that was measured first, at another time. A round of
        the checkpoint counts when it is whole: its figures are compared with one another.
        """
        words, aim = self._options.words, self._options.aim
        finalists = [name for name in verdict.ranked(self._trials.observations, aim) if name != self._base]
        finalists = finalists[: words.finalists]
        if not finalists or not words.rounds:
            return []
        names = [self._base, *finalists]
        mark = hashlib.blake2b(" ".join(names).encode(), digest_size=8).hexdigest()
        turns = []
        left = words.rounds * len(names)
        with ExitStack() as stack:
            servers = SideBySide(stack, self._beside, aim)
            for number in range(words.rounds):
                order = names if number % 2 == 0 else names[::-1]
                known = {name: self._known(TURN, f"{mark}:{number}:{name}") for name in order}
                is_whole = all(found is not None for found in known.values())
                turn = {}
                for name in order:
                    settings, record = self._trials.settings[name], f"{mark}:{number}:{name}"
                    found = known[name] if is_whole else None
                    if found is None:
                        found = self._observed(TURN, record, settings, left, partial(servers.measured, name))
                    else:
                        self._tell(name, found, left, "known")
                    turn[name] = verdict.with_memory_of(found, self._trials.observations[name])
                    left -= 1
                turns.append(turn)
        return turns

    def _beside(self, name: str) -> Callable[[Mapping[str, str]], AbstractContextManager[Turn]]:
        copies = ModelCopies(self._options.words.model_repository, self._loaded, self._root / name)
        return partial(running, self._options, copies, self._targets, self._loaded)

    # -- report --------------------------------------------------------------------------------------------------------

    def _report(self, turns: list[dict[str, dict[str, Any]]], interrupted: bool) -> dict[str, Any]:
        aim, gain = self._options.aim, self._options.gain
        observations = self._trials.observations
        scores = {name: verdict.score_of(found, aim) for name, found in observations.items()}
        medians, stays = dict[str, Score](), ""
        winner = (verdict.ranked(observations, aim) or [""])[0]
        if turns:
            winner, medians = verdict.confirmed(turns, self._base, aim, gain)
            if stays := verdict.stays_unheard(turns, self._base, observations[self._base], aim):
                winner = self._base
                medians[winner] = scores[winner] if verdict.has_failed(medians[winner]) else medians[winner]
                self._notes.append(stays)
                _say(stays)
            scores |= medians
        elif winner and not verdict.improves(scores[winner], scores[self._base], gain):
            winner = self._base
        if winner and not verdict.is_within(scores[winner]):
            winner = ""
        changes = self._changes(winner) if winner else []
        configs = self._configs(self._trials.settings[winner]) if winner else {}
        return {
            "models": list(self._targets), "tuned": self._tuned, "search": self._options.words.search,
            "objective": aim.objective, "percentile": aim.percentile, "latency_limit_us": aim.latency_us,
            "memory_limit_bytes": aim.memory_bytes, "min_gain": gain, "notes": self._notes, "interrupted": interrupted,
            "load": "requests a second" if self._options.is_open else "requests in flight",
            "dimensions": [
                {"model": d.model, "knob": d.knob, "values": d.values, "written": d.values[d.start]}
                for d in self._dimensions
            ],
            "trials": [
                {
                    "name": name, "settings": tune_report.settings_document(self._trials.settings[name]),
                    "score": list(verdict.score_of(found, aim)), "observation": found,
                    "level": verdict.best_level(found, aim) if verdict.levels_of(found) else None,
                }
                for name, found in observations.items()
            ],
            "front": verdict.front(observations, aim), "base": self._base, "winner": winner,
            "turns": turns, "medians": {name: list(score) for name, score in medians.items()},
            "reasons": [stays] if stays else self._reasons(winner, changes, turns, scores[self._base]),
            "changed": {model: text for model in self._tuned if (text := _changes_text(changes, model))},
            "configs": {model: self._config_text(model, config, changes) for model, config in configs.items()},
        }  # fmt: skip

    def _changes(self, name: str) -> list[tuple[str, str, str, str]]:
        """(model, knob, from, to) of what the configuration changes."""
        base, found = self._trials.settings[self._base], self._trials.settings[name]
        return [(*owner, base[owner], value) for owner, value in found.items() if base[owner] != value]

    def _reasons(
        self, winner: str, changes: Sequence[tuple[str, str, str, str]], turns: Sequence[Mapping[str, Any]], base: Score
    ) -> list[str]:
        if not winner:
            observations = self._trials.observations
            if all(verdict.has_failed(verdict.score_of(found, self._options.aim)) for found in observations.values()):
                why = verdict.failure(observations[self._base]) or "no request was answered"
                return [f"Every measured configuration failed; as written: {why}"]
            return ["No measured configuration keeps to the limits."]
        if winner == self._base and turns:
            return [
                "Measured in turns, none of the best configurations was better than the one as written, by the gain in "
                "the median and in each round (of more than four: in all but one)."
            ]
        several = len(self._tuned) > 1
        named = [(f"{model} {knob}" if several else knob, before, after) for model, knob, before, after in changes]
        seen = verdict.typical_turn(turns, self._base, winner, self._options.aim) or self._trials.observations
        said = verdict.reasons(seen[self._base], seen[winner], named, self._options.aim)
        if why := verdict.cannot_stay(base):
            said.insert(1, why)
        if winner != self._base and verdict.overlap(turns, self._base, winner, self._options.aim):
            said.append(
                "The best round of the configuration as written was as good as the worst of the winner: the difference "
                "may be less than it looks; more --rounds or a quieter machine tell more."
            )
        return said

    def _config_text(self, model: str, config: ModelConfig, changes: Sequence[tuple[str, str, str, str]]) -> str:
        said = _changes_text(changes, model)
        if not said:
            place = self._copies.sources[model] / CONFIG_FILE
            return place.read_text(encoding="utf-8") if place.exists() else ""
        return f"# charonia tune: {said}. Comments of the file before are not in this one.\n{_text(config)}"


def _changes_text(changes: Sequence[tuple[str, str, str, str]], model: str) -> str:
    return ", ".join(f"{knob} from {before} to {after}" for owner, knob, before, after in changes if owner == model)


def _parts(repositories: Sequence[str], targets: Sequence[str]) -> tuple[list[str], list[str]]:
    """The models to tune: the targets, of ensembles those of their steps; and the ensembles."""
    tuned: list[str] = []
    ensembles: list[str] = []
    waiting = list(targets)
    while waiting:
        model = waiting.pop(0)
        config = written_config(find_model(repositories, model), model)
        if config.HasField("ensemble_scheduling"):
            ensembles.append(model)
            waiting += [step for step in composing_models(config) if step not in (*ensembles, *tuned, *waiting)]
        else:
            tuned.append(model)
    return tuned, ensembles


def _files(options: TuneOptions, targets: Sequence[str]) -> list[str]:
    """Files of input data of the targets."""
    found = []
    for target in targets:
        for text in options.of_model("input_data", target):
            path = Path(text)
            found += sorted(str(file) for file in path.iterdir() if file.is_file()) if path.is_dir() else []
            found += [text] if path.is_file() else []
    return found


def _text(config: ModelConfig) -> str:
    return text_format.MessageToString(config)


def _name(configs: Mapping[str, ModelConfig]) -> str:
    """The name of a configuration, equal for those that are."""
    text = json.dumps({model: identity(config) for model, config in configs.items()})
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _say(text: str) -> None:
    sys.stderr.write(f"charonia tune: {text}\n")
    sys.stderr.flush()
