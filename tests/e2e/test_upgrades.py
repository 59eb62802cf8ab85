"""State directories that earlier revisions left, of which this one has to go on: jobs, results, keys and sequences.

`tests/golden/state` holds what `charonia serve` of those revisions left on Redis 7.0 (which every supported program
reads) when it was killed: under 50 KB each, as only real bytes show that a release still reads them. `jobs` is of the
first revision that had jobs (73cf1b6), `sequences` of the first that had sequences (e5d02d1). `about.json` says what
was in them: jobs that had ended, jobs that waited, a call with a key, and the values of a sequence so far. Results are
kept for ten years. Nothing there is ever changed; a new format of state gets a new directory.

How one is made: check that revision out, and run its `serve` (`PYTHONPATH` and working directory there) with
`--log-server=redis-server`, `--job-retention-secs=315360000`, and the models of `carried_state.build_models` (of these
only `gated` for `jobs`). With the functions of `carried_state`: ten jobs that end; the call with a key, which is the
eleventh execution, so that a second one cannot give the same answer; the sequence. Of five more jobs the first runs
until the end, in a `gated` that keeps the value 50 for ever: no request may name the path of a gate. Kill the process
group with SIGKILL, and keep `appendonlydir`: no more is read back, and it names no path.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import carried_state as carried
import pytest
from e2e_server import serving

pytestmark = pytest.mark.e2e

LEFT = Path(__file__).resolve().parents[1] / "golden" / "state"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return carried.build_models(tmp_path_factory.mktemp("models"))


def charonia(*words: str | Path) -> bytes:
    command = [str(Path(sys.executable).parent / "charonia"), *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True).stdout


@pytest.mark.parametrize("moved", [False, True], ids=["as-it-is", "exported"])
@pytest.mark.parametrize("revision", sorted(path.name for path in LEFT.iterdir()))
@pytest.mark.long
def test_it_goes_on_from_what_an_earlier_revision_left(
    models: Path, tmp_path: Path, revision: str, moved: bool
) -> None:
    begun_s = time.time()
    about: dict[str, Any] = json.loads((LEFT / revision / "about.json").read_text())
    state = tmp_path / "state"
    shutil.copytree(LEFT / revision / "appendonlydir", state / "appendonlydir")
    if moved:
        charonia("state", "export", tmp_path / "file", "--state-dir", state)
        state = tmp_path / "moved"
        charonia("state", "import", tmp_path / "file", "--state-dir", state)
    ended = {int(number): location for number, location in about["ended"].items()}
    waiting = {int(number): location for number, location in about["waiting"].items()}
    with serving(models, state) as server:
        carried.check_results(server, ended)
        assert carried.ask_again(server, 77) == tuple(about["once"]), "its answer was kept"
        carried.check_results(server, waiting)
        for location in waiting.values():
            shown = charonia("jobs", "show", location.rpartition("/")[2], "--state-dir", state, "--json")
            assert json.loads(shown)["ended_us"] / 1e6 > begun_s, "it had waited until now"
        if "sequence" in about:
            assert carried.step(server, 7) == carried.state_after(*about["sequence"], 7)
        # the first revisions did not note that a job was batched: only what this one did has to add up
        charonia("audit", "--state-dir", state, "--since", datetime.fromtimestamp(begun_s).isoformat())
