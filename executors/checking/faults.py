"""What a check finds: faults with their places, corrections, and what it could not decide."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Place:
    """A line and column of a file, counted from 1; 0 where the file has no such position. `field` is a dotted path."""

    line: int = 0
    column: int = 0
    field: str = ""


@dataclass(frozen=True, slots=True)
class TextEdit:
    """Replaces `text[start:end]` of a configuration file."""

    start: int
    end: int
    replacement: str

    def apply(self, text: str) -> str:
        return text[: self.start] + self.replacement + text[self.end :]


@dataclass(frozen=True, slots=True)
class Move:
    """Moves a file to a path that does not exist, whose parent is made."""

    source: Path
    target: Path


Correction = TextEdit | Move


@dataclass(frozen=True, slots=True)
class Fault:
    """A reason why a model cannot be loaded. `problem` is the error's text at load."""

    model: str
    file: str
    place: Place
    problem: str
    expected: str
    instead: str
    correction: Correction | None = None

    def document(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "file": self.file,
            **asdict(self.place),
            "problem": self.problem,
            "expected": self.expected,
            "instead": self.instead,
            "fixable": self.correction is not None,
        }


@dataclass(frozen=True, slots=True)
class Note:
    """What could not be decided without running a model, is left out by a load, or has no effect. `model` is "" for the
    repository.
    """

    model: str
    text: str
