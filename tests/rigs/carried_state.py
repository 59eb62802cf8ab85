"""A state worth carrying: jobs that have ended and that wait, an idempotency key, and a live sequence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from e2e_asking import infer, until
from e2e_jobs import GATED, ask, output, result, submit, value_of, view
from e2e_models import gated, put

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from loadtest.sequences import FACTOR, MODULUS, build

SEQUENCE = 7
KEY = {"Idempotency-Key": "carried"}
YEARS_US = 10 * 365 * 86_400 * 1_000_000


def build_models(repository: Path) -> Path:
    """`gated`, whose jobs wait for files, and `digest`, a sequence model with a state that may rest for years."""
    gated(repository, "gated", GATED)
    build(repository, batch=4, candidates=8)
    config = repository / "digest" / "config.pbtxt"
    put(config, config.read_text().replace("120000000", str(YEARS_US)))
    return repository


def step(server: Any, value: int, *, start: bool = False) -> float:
    """One request of the sequence; its state after it."""
    options = {"sequence_id": SEQUENCE, "sequence_start": start, "sequence_end": False}
    answer = infer(server, "digest", "http", options, VALUE=np.array([[value]], np.float32))
    return float(answer.as_numpy("STATE")[0, 0])


def state_after(*values: int) -> float:
    state = 0
    for value in values:
        state = (FACTOR * state + value) % MODULUS
    return float(state)


def submit_ended(server: Any, number: int, **headers: str) -> str:
    """A job that has a result."""
    location = submit(server, number, **headers)
    assert (result(server, location)[0], view(server, location)["state"]) == (200, "succeeded")
    return location


def submit_held(server: Any, gate: Path, number: int, **headers: str) -> str:
    """A job that is executed until `gate` exists."""
    entered = gate.with_suffix(".entered")
    entered.unlink(missing_ok=True)
    location = submit(server, number, {"gate": str(gate), "entered": str(entered)}, **headers)
    until("the job is executed", entered.exists)
    return location


def check_results(server: Any, locations: dict[int, str]) -> None:
    """Every job has ended with its own value."""
    answers = {number: result(server, location) for number, location in locations.items()}
    assert {number: (status, output(answer, "ECHO")) for number, (status, answer) in answers.items()} == {
        number: (200, number) for number in locations
    }


def ask_again(server: Any, number: int) -> tuple[int, int]:
    """The call that was made once with `KEY`; status, and in which execution of its model it was answered."""
    status, _, body = ask(server, "POST", "/v2/models/gated/infer", value_of(number), KEY)
    return status, output(json.loads(body), "EXECUTION") if status == 200 else -1
