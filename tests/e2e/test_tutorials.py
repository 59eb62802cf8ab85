"""The commands of pages, as a reader would give them, against one server; what they print is what the page shows.

Which blocks are executed, and how they are compared: `page_commands`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_models import python
from e2e_server import Server, serving
from page_commands import MARK, Ids, Reader, executed_blocks, matches

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/jobs.md", "docs/howto/cache-responses.md", "docs/howto/python-client.md")


@pytest.fixture(scope="module")
def tutorial_server(few_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The models that the pages speak of: three examples, one of them cached, and `count` from the page about it."""
    repository = tmp_path_factory.mktemp("tutorials")
    for name in ("identity", "magika"):
        (repository / name).symlink_to((few_models / name).resolve())
    shutil.copytree(few_models / "magika_features", repository / "magika_features")
    with (repository / "magika_features" / "config.pbtxt").open("a") as config:
        config.write("response_cache { enable: true }\n")
    page = (ROOT / "docs" / "howto" / "decoupled-models.md").read_text()
    texts = dict(reversed(re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)))
    python(repository, "count", texts["python"], texts["protobuf"].replace('backend: "python"\n', ""))
    state = tmp_path_factory.mktemp("tutorials-state")
    with serving(repository, state, "--cache-config=local,size=268435456") as running:
        yield running


@pytest.mark.parametrize("page", PAGES)
def test_a_reader_sees_what_the_page_shows(page: str, tutorial_server: Server, tmp_path: Path) -> None:
    running = tutorial_server
    reader = Reader(tmp_path / "reader", http=running.http, grpc=running.grpc, metrics=running.metrics)
    wrong = reader.follow((ROOT / page).read_text())
    assert not wrong, "\n\n".join(wrong)


def test_every_page_with_a_mark_is_followed() -> None:
    marked = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md") if MARK in path.read_text()}
    assert marked | {"README.md"} == set(PAGES)
    for page in PAGES:
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


def test_an_id_is_used_by_the_commands_after_it() -> None:
    ids = Ids()
    assert matches('{"id":"' + "0" * 32 + '.m"}', '{"id":"' + "f" * 32 + '.m"}', ids)
    assert (
        ids.replaced("curl localhost:8000/v2/jobs/" + "0" * 32 + ".m")
        == "curl localhost:8000/v2/jobs/" + "f" * 32 + ".m"
    )
