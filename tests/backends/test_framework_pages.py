"""The pages about frameworks without a backend of their own, followed as a reader would: their own lines compare what
is served with what the framework answers by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_server import Server, serving
from page_commands import OF_FRAMEWORKS, ROOT, Reader, files_of

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One whose repository is empty, and which loads what it is asked to."""
    repository = tmp_path_factory.mktemp("models")
    state = tmp_path_factory.mktemp("state")
    with serving(repository, state, "--model-control-mode=explicit") as running:
        running.repository = repository  # type: ignore[attr-defined]
        yield running


@pytest.mark.parametrize("page", OF_FRAMEWORKS)
def test_a_reader_sees_what_the_page_shows(
    page: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "reader"
    reader = Reader(folder, http=server.http, grpc=server.grpc, metrics=server.metrics, log_url=server.log_url)
    monkeypatch.chdir(tmp_path)  # for python blocks; what runs in the reader's folder is ended
    for place in (folder, tmp_path):
        (place / "models").symlink_to(server.repository)  # type: ignore[attr-defined]
    text = (ROOT / page).read_text()
    written = files_of(text)
    assert written
    for name, content in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    wrong = reader.follow(text)
    assert not wrong, "\n\n".join(wrong) + server.log()
