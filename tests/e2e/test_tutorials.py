"""The commands of pages, as a reader would give them, against one server; what they print is what the page shows.

Which blocks are executed, and how they are compared: `page_commands`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from e2e_asking import infer, until
from e2e_server import Server, serving
from page_commands import (
    MARK,
    OF_FRAMEWORKS,
    OF_LANGUAGE_MODELS,
    OF_THE_STACK,
    Ids,
    Reader,
    executed_blocks,
    matches,
    write_files,
)

from charonia import keys

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *("README.md", "docs/jobs.md", "docs/howto/cache-responses.md", "docs/howto/python-client.md"),
    *("docs/howto/bench.md", "docs/howto/journal.md", "docs/howto/release.md", "docs/howto/simulate.md"),
    *("docs/howto/usage.md", "docs/howto/tune.md", "docs/howto/console.md", "docs/streaming.md", "docs/queue-tools.md"),
    *("docs/howto/decoupled-models.md", "docs/howto/shared-memory.md", "docs/howto/check.md", "docs/howto/migrate.md"),
    *("docs/howto/business-logic.md", "docs/howto/sequences.md"),
)
"""What `docs/howto/kubernetes.md` shows cannot be executed: it needs a cluster. `make helm` follows its commands as far
as they need none (`tools/helm_chart/shown_commands.py`)."""
ELSEWHERE = (*OF_FRAMEWORKS, *OF_LANGUAGE_MODELS, *OF_THE_STACK)
"""Pages with marks that other tests follow."""
FIRST = ("README.md", "docs/jobs.md")
"""The pages that `make test` follows; `make test-long` follows the others."""
OF_MODELS = ("docs/howto/decoupled-models.md", "docs/streaming.md", "docs/howto/business-logic.md")
"""Pages that show the files of a model, which the server has."""
ASKED = 8


@pytest.fixture(scope="module")
def tutorial_server(
    few_models: Path, example_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The models that the pages speak of: four examples, one of them cached, those of `OF_MODELS`, and
    `resnet` in three equal versions, whose tensors no page looks at. The journal has requests of `identity`, some of
    them sealed, and their usage is written. Requests that version 2 of `resnet` has answered are recorded.
    """
    repository = tmp_path_factory.mktemp("tutorials")
    for name in ("identity", "magika"):
        (repository / name).symlink_to((few_models / name).resolve())
    (repository / "silero_vad").symlink_to(example_models / "silero_vad")
    shutil.copytree(few_models / "magika_features", repository / "magika_features")
    with (repository / "magika_features" / "config.pbtxt").open("a") as config:
        config.write("response_cache { enable: true }\n")
    for page in OF_MODELS:
        write_files((ROOT / page).read_text(), repository)
    _write_versions(few_models / "identity", repository / "resnet")
    state = tmp_path_factory.mktemp("tutorials-state")
    flags = ("--cache-config=local,size=268435456", "--journal=all", "--journal-seal-secs=1", "--allow-client-shm=true")
    with serving(repository, state, *flags) as running:
        for _ in range(ASKED):
            infer(running, "identity", INPUT0=np.ones((1, 16), np.float32))
            infer(running, "resnet", options={"model_version": "2"}, INPUT0=np.ones((1, 16), np.float32))
        recorded = f'charonia_recorded_requests_total{{model="resnet",result="recorded"}} {ASKED}\n'
        until("the recordings", lambda: recorded in running.scrape())
        sealed = re.compile(r'^charonia_journal_sealed_entries_total\{model="identity"\} [1-9]', re.MULTILINE)
        until("a seal of the journal", lambda: sealed.search(running.scrape()))
        used = keys.usage("identity", 0).rpartition(b":")[0]
        with running.log_client() as log:
            until("usage in the log", lambda: any(log.scan_iter(used + b":*")))
        yield running


def _write_versions(model: Path, place: Path) -> None:
    """The model in versions 1 to 3, all of them served; all its requests are recorded."""
    for version in ("1", "2", "3"):
        shutil.copytree(model / "1", place / version)
    config = (model / "config.pbtxt").read_text().replace('"identity"', f'"{place.name}"')
    recorded = 'parameters { key: "charonia.record_share" value { string_value: "1" } }\n'
    (place / "config.pbtxt").write_text(config + "version_policy { all { } }\n" + recorded)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page in FIRST else pytest.mark.long) for page in PAGES]
)
def test_a_reader_sees_what_the_page_shows(page: str, tutorial_server: Server, tmp_path: Path) -> None:
    running = tutorial_server
    places = {"http": running.http, "grpc": running.grpc, "metrics": running.metrics, "log_url": running.log_url}
    reader = Reader.of_server(tmp_path / "reader", **places)
    wrong = reader.follow((ROOT / page).read_text())
    assert not wrong, "\n\n".join(wrong)


def test_every_page_with_a_mark_is_followed() -> None:
    marked = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md") if MARK.search(path.read_text())
    }
    assert marked | {"README.md"} == {*PAGES, *ELSEWHERE}
    for page in (*PAGES, *ELSEWHERE):
        assert executed_blocks((ROOT / page).read_text())


@pytest.mark.parametrize(
    ("shown", "printed", "is_right"),
    [
        ("speech from 0.54 s", "speech  from 0.545 s\n", True),
        ("speech from 0.54 s", "speech from 0.64 s", False),
        ('{"state":"queued",...}', '{"state":"queued","position":3}', True),
        ('{"state":"queued",...}', '{"state":"running","position":3}', False),
        ("a" * 32 + ".m " + "a" * 32, "b" * 32 + ".m " + "b" * 32, True),
        ("a" * 32 + ".m " + "a" * 32, "b" * 32 + ".m " + "c" * 32, False),
        ("", "", True),
        ("", "an error", False),
    ],
)
def test_what_is_shown_stands_for_what_is_printed(shown: str, printed: str, is_right: bool) -> None:
    assert matches(shown, printed, Ids()) is is_right


@pytest.mark.parametrize(
    ("shown", "printed", "is_right"),
    [
        ("16 entries from 1795453756166-0", "7 entries from 1795453800001-12", True),
        ("error -0.0 % +1.2 %", "error +12.5 % -3.1 %", True),
        ("398 B  1.1s  yes", "398 B  931ms  yes", True),
        ("398 B  1.1s  yes", "398 B  931  yes", False),
        ("rate 151.7", "rate -", False),
        ("16 entries", "16 facts", False),
    ],
)
def test_measured_numbers_stand_for_any(shown: str, printed: str, is_right: bool) -> None:
    assert matches(shown, printed, Ids(), other_numbers=True) is is_right


def test_an_id_is_used_by_the_commands_after_it() -> None:
    ids = Ids()
    assert matches('{"id":"' + "0" * 32 + '.m"}', '{"id":"' + "f" * 32 + '.m"}', ids)
    assert (
        ids.replaced("curl localhost:8000/v2/jobs/" + "0" * 32 + ".m")
        == "curl localhost:8000/v2/jobs/" + "f" * 32 + ".m"
    )


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """Of pages that ask no server."""
    return Reader(tmp_path / "reader", places={}, environment={})


LEAVES_ONE_BEHIND = """<!-- executed -->
```console
$ bash -c "trap '{trap}' TERM; echo \\$\\$ > pid; mv pid ready; while :; do sleep 0.02; done" > /dev/null 2>&1 &
$ until [ -f ready ]; do sleep 0.02; done
```
"""


def test_a_page_ends_when_what_it_left_behind_has_ended(reader: Reader, tmp_path: Path) -> None:
    assert not reader.follow(LEAVES_ONE_BEHIND.format(trap="sleep 0.5; touch ended; exit"))
    assert (tmp_path / "reader" / "ended").exists()


def test_what_ignores_sigterm_is_killed(reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("page_commands._ENDS_WITHIN_S", 0.2)
    assert not reader.follow(LEAVES_ONE_BEHIND.format(trap=""))
    place = Path("/proc", (tmp_path / "reader" / "ready").read_text().strip(), "stat")
    assert not place.exists() or place.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_the_console_has_a_port_once_a_page_names_it(reader: Reader) -> None:
    page = """<!-- executed -->
```console
$ echo "${CHARONIA_CONSOLE_PORT-none}"
none
```
<!-- executed -->
```console
$ [ localhost:8004 = "127.0.0.1:$CHARONIA_CONSOLE_PORT" ] && echo the same
the same
```
"""
    assert not reader.follow(page)
