"""`charonia simulate`: reads recordings and configurations, simulates, prints.

Exit codes: 0 done, 1 something failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from charonia import keys
from charonia.catalog.catalog import Catalog
from charonia.clock import wall_ns
from charonia.errors import ConfigError, InvalidArgument
from charonia.eventlog.control import folded_control
from charonia.eventlog.port import START, Streams
from charonia.models.config_forms import from_json, parse
from charonia.models.interface import ModelInterface
from charonia.operations.command_line import log_place
from charonia.operations.queued import known_models, must_be_known
from charonia.operations.trace_files import read_trace_file

from .journal_recording import JournalRecording
from .processor_shares import Said, are_started_apart, is_batcher_apart
from .recorded_requests import RecordedRequest, Recording
from .simulate_options import parser, questions_of, window_ns
from .simulated_run import Setting
from .simulation_document import document_text, model_document
from .simulation_page import page
from .trace_recording import trace_recordings
from .what_if import changed, named_models, what_if

_PAGE = 1000
_ATTEMPTS = 4
_BARE = ModelInterface("", "", "", 0, {}, {})
_IN_THE_RECORDING = {
    "cores": "what sharing them cost is in the recorded executions",
    "rate": "it is that of the recorded arrivals",
}
"""Changes that `--recorded` refuses, and why."""

Recorded = tuple[Recording, Setting]


def run(words: Sequence[str], environment: Mapping[str, str], default_state_dir: Callable[[], str]) -> int:
    """The command line `words`, the command first; the exit code.

    Raises `SystemExit` for usage and help, and the `CharoniaError` of what cannot be read or simulated.
    """
    options = parser().parse_args(list(words))
    questions = questions_of(options)
    skip_ns, take_ns = window_ns(options)
    if options.measured and not questions:
        raise InvalidArgument("--measured is a run under a question: ask one")
    recorded = _recorded(options, environment, default_state_dir)
    if not recorded:
        raise InvalidArgument(_nothing(options))
    had = [what_if(options.recorded)] if options.recorded else []
    named_models([*had, *questions], {one.model: one for one, _ in recorded})
    measured = _measured(options, [one.model for one, _ in recorded])
    document = {
        "seed": options.seed,
        "models": [
            model_document(
                one.cut(skip_ns, take_ns), _corrected(setting, options), questions, options.seed,
                measured.get(one.model, ()),
            )
            for one, setting in recorded
        ],
    }  # fmt: skip
    sys.stdout.write(json.dumps(document) + "\n" if options.json else document_text(document))
    if options.html:
        try:
            Path(options.html).write_text(page(document), encoding="utf-8")
        except OSError as error:
            raise InvalidArgument(f"'{options.html}' cannot be written: {error.strerror}") from None
    return 0


def _nothing(options: argparse.Namespace) -> str:
    of_these = " of these models" if options.model else ""
    if options.trace:
        return f"nothing that ran was recorded{of_these}"
    return (
        f"nothing that ran is in the journal{of_these}: it has only jobs unless the server runs with --journal all; "
        "or trace requests, and name the file"
    )


def _corrected(setting: Setting, options: argparse.Namespace) -> Setting:
    if not options.recorded:
        return setting
    words = what_if(options.recorded)
    for change in words.changes:
        if reason := _IN_THE_RECORDING.get(change.name):
            raise InvalidArgument(f"--recorded takes no {change.name}: {reason}")
    return changed(setting, (), words)[0]


def _measured(options: argparse.Namespace, models: Sequence[str]) -> Mapping[str, Sequence[RecordedRequest]]:
    if not options.measured:
        return {}
    found = trace_recordings([read_trace_file(name) for name in options.measured], models)
    window = window_ns(options)
    return {model: one.cut(*window).requests for model, one in found.items()}


def _recorded(
    options: argparse.Namespace, environment: Mapping[str, str], default_state_dir: Callable[[], str]
) -> list[Recorded]:
    if options.trace:
        found = trace_recordings([read_trace_file(name) for name in options.trace], options.model)
        interfaces = _interfaces(options, environment, sorted(found))
        return [(found[model], traced_setting(found[model], interfaces[model])) for model in sorted(found)]
    url, password_file = log_place(options, environment, default_state_dir)
    return asyncio.run(_of_journals(options, url, password_file))


# -- trace files and configurations ------------------------------------------------------------------------------------


def traced_setting(recorded: Recording, interface: ModelInterface) -> Setting:
    """What trace files tell of how the model was served."""
    executors = max(1, recorded.executors)
    # where no executor says it: as `serve` has it by default
    setting = Setting(interface, executors, _instances(interface), 0 if executors == 1 else 1)
    return _with_batcher(setting, recorded.said)


def _with_batcher(setting: Setting, said: Sequence[Said]) -> Setting:
    """The batcher where it was, if that is known: an executor with it in its process is given no batch ahead."""
    is_apart = is_batcher_apart(said)
    prefetch = setting.prefetch if is_apart is None else int(is_apart)
    return replace(setting, prefetch=prefetch, keeps_apart=are_started_apart(said))


def _instances(interface: ModelInterface) -> int:
    groups = (group for group in interface.instance_groups if not group.passive)
    return max(1, sum(max(1, group.count) * max(1, len(group.gpus)) for group in groups))


def _interfaces(
    options: argparse.Namespace, environment: Mapping[str, str], models: Sequence[str]
) -> dict[str, ModelInterface]:
    if options.model_repository:
        return {model: _of_repository(Path(options.model_repository), model) for model in models}
    url = options.url or environment.get("CHARONIA_URL", "")
    if url:
        from charonia.client import Client, RetryPolicy

        with Client(url, retry=RetryPolicy(_ATTEMPTS)) as client:
            return {model: ModelInterface.of(from_json(dict(client.config(model)))) for model in models}
    if options.recorded:  # which says all there is to know
        return {model: _named(model) for model in models}
    raise InvalidArgument(
        "a trace file does not hold configurations: name the server with --url or the models with --model-repository"
    )


def _named(model: str) -> ModelInterface:
    return ModelInterface(model, "", "", _BARE.max_batch_size, {}, {})


def _of_repository(repository: Path, model: str) -> ModelInterface:
    path = repository / model / "config.pbtxt"
    try:
        config = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"'{path}' cannot be read: {error.strerror}") from None
    except (ConfigError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"'{path}' is no model configuration: {error}") from None
    config.name = model
    return ModelInterface.of(config)


# -- journals ----------------------------------------------------------------------------------------------------------


async def _of_journals(options: argparse.Namespace, url: str, password_file: str) -> list[Recorded]:
    from charonia.eventlog.redis import open_log
    from charonia.eventlog.redis.server.address import with_password

    log = open_log(with_password(url, password_file))
    await log.open()
    try:
        for model in options.model:
            await must_be_known(log, model)
        catalog = await folded_control(log)
        found = []
        for model in options.model or await known_models(log):
            recorded = await journal_of(log, model, _after(options))
            setting = served_setting(catalog, model)
            if setting is not None and any(one.ran for one in recorded.requests):
                # executors may have been started again since
                found.append((recorded, _with_batcher(setting, recorded.said)))
        return found
    finally:
        await log.close()


def _after(options: argparse.Namespace) -> bytes:
    if options.since is None:
        return START
    kind, seconds = options.since
    since_s = wall_ns() / 1e9 - seconds if kind == "ago" else seconds
    return b"%d-0" % max(0, int(since_s * 1000) - 1)


async def journal_of(log: Streams, model: str, after: bytes) -> Recording:
    """What the journal of a model says from an entry on. Raises `InvalidRecord`."""
    fold = JournalRecording(model)
    stream = keys.journal(model)
    while entries := await log.range(stream, after, _PAGE):
        after = entries[-1].id
        for entry in entries:
            fold.fold(entry.id, entry.fields)
    return fold.recording()


def served_setting(catalog: Catalog, model: str) -> Setting | None:
    """How the newest version of a model is served now; None for one that no executor serves."""
    held = catalog.held(model)
    if not held:
        return None
    served = held[max(held)]
    slots = {executor: count for executor, count in served.slots.items() if count}
    views = [catalog.executors[name] for name in slots if name in catalog.executors]
    hosted = bool(views) and all(view.joined.hosts_batcher for view in views)
    instances = max(slots.values(), default=_instances(served.interface))
    return Setting(served.interface, max(1, len(slots)), instances, 0 if hosted else 1, dict(catalog.lane_weights))
