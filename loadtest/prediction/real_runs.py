"""Runs of a real server: a recording with its trace file and its journal, or what is measured; and the predictions.

Recorded and measured runs are alike but for what a question changes: requests are traced, and journalled, in both, and
arrive in the same pattern from one process of `charonia bench`.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadtest.bench.servers import Charonia
from loadtest.model import CONTROL_TIMEOUT_S, LoadTestError

from .questioned import Question, faster, write_model

FLAGS = ("--journal=all", "--journal-seal-secs=0", "--allow-webhooks=false")
"""Of every server. Seals are left out: they wake the owner at times that are not the load's."""
_WARM_UP_REQUESTS = 64
_WARM_UP_IN_FLIGHT = 16


class RealRun:
    """A server with one model as a question has it, whose requests are traced; a context manager."""

    def __init__(self, folder: Path, model: str, asked: Question) -> None:
        """`folder` is new, and gets the repository `models` and the trace file."""
        self.trace = folder / "trace.json"
        self.repository = folder / "models"
        self._asked = asked
        self._began = ""
        self.model = write_model(self.repository, model, asked)
        traces = f"--trace-config=triton,file={self.trace}"
        self._server = Charonia(self.repository, (*FLAGS, traces, *asked.flags))

    def __enter__(self) -> RealRun:
        self._server.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """What was traced is in the file only behind this."""
        self._server.__exit__(*error)

    def load(self, intervals_us: Sequence[int], shapes: Sequence[str]) -> None:
        """Warms the model up, then sends the requests and waits for their answers. Raises LoadTestError when one
        fails."""
        address = str(self._server.endpoints.http)
        common = ["bench", "-m", self.model, "-u", address, "--max-threads", "1"]
        common += [word for shape in shapes for word in ("--shape", shape)]
        program([*common, "--concurrency-range", str(_WARM_UP_IN_FLIGHT), "--request-count", str(_WARM_UP_REQUESTS)])
        _trace_all(address, self.model)
        self._began = datetime.now(UTC).isoformat(timespec="milliseconds")
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("".join(f"{interval}\n" for interval in faster(intervals_us, self._asked.rate)))
            file.flush()
            program([*common, "--request-intervals", file.name, "--request-count", str(len(intervals_us))])

    def journal_predictions(self, questions: Sequence[str]) -> dict[str, Any]:
        """What `charonia simulate` says of this run from its journal, while the server runs."""
        place = ["--log-url", str(self._server.endpoints.log_url), "--since", self._began]
        asked = [word for text in questions for word in ("--what-if", text)]
        return simulated([*place, "-m", self.model, *asked])


def trace_predictions(recorded: RealRun, text: str, measured: Path) -> dict[str, Any]:
    """What `charonia simulate` says from the trace file of a run that has ended, and how far that is from the trace
    file `measured` of a real run under the question."""
    words = [str(recorded.trace), "-m", recorded.model, "--model-repository", str(recorded.repository)]
    return simulated([*words, "--what-if", text, "--measured", str(measured)])


def _trace_all(address: str, model: str) -> None:
    """From now on. Raises LoadTestError when the server does not."""
    connection = http.client.HTTPConnection(address, timeout=CONTROL_TIMEOUT_S)
    body = json.dumps({"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
    try:
        connection.request("POST", f"/v2/models/{model}/trace/setting", body)
        answer = connection.getresponse()
        if answer.status != 200:
            raise LoadTestError(f"tracing: {answer.status} {answer.read()[:500]!r}")
    except (OSError, http.client.HTTPException) as error:
        raise LoadTestError(f"tracing: {error}") from None
    finally:
        connection.close()


def simulated(words: Sequence[str]) -> dict[str, Any]:
    """The document of one model."""
    document: Mapping[str, Any] = json.loads(program(["simulate", *words, "--json"]))
    (found,) = document["models"]
    return dict(found)


def program(words: Sequence[str]) -> str:
    """What a command of `charonia` prints. Raises LoadTestError with its error when its exit code is not 0."""
    done = subprocess.run(
        [sys.executable, "-m", "charonia.cli", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise LoadTestError(f"charonia {words[0]} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout
