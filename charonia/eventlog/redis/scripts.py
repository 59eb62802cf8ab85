"""The scripts of `charonia/eventlog/scripts` as commands; their headers describe them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

_INCLUDE = re.compile(rb"^--#include (\S+)\n", re.MULTILINE)
_COMMENTS = re.compile(rb"^[ ]*(?:--.*)?\n", re.MULTILINE)
_DIRECTORY = Path(__file__).resolve().parent.parent / "scripts"


@dataclass(frozen=True, slots=True)
class Script:
    """`text` is for readers; `source`, without comments, is for the server, which names it by `digest` (EVALSHA).

    Scripts are sent together with the authentication; before that, servers accept no argument above 16 KiB.
    """

    text: bytes
    source: bytes
    digest: bytes


def load(name: str) -> Script:
    """A script with its `--#include` lines replaced by those files."""
    text = (_DIRECTORY / f"{name}.lua").read_bytes()
    text = _INCLUDE.sub(lambda line: (_DIRECTORY / line[1].decode()).read_bytes(), text)
    source = _COMMENTS.sub(b"", text)
    # EVALSHA's name for a script, not a safeguard
    return Script(text, source, hashlib.sha1(source, usedforsecurity=False).hexdigest().encode())


ACCEPT = load("accept")
ACCEPT_JOB = load("accept_job")
SETTLE = load("settle")
SETTLE_RECORDED = load("settle_recorded")
BEGIN_ATTEMPT = load("begin_attempt")
BEGIN_REQUESTS = load("begin_requests")
ADD_JOB_EVENT = load("add_job_event")
JOB_POSITION = load("job_position")
ADD_JOB_RESPONSES = load("add_job_responses")
APPEND_PROGRESS = load("append_progress")
FORGET_ENDED = load("forget_ended")
FORGET_SEQUENCES = load("forget_sequences")
KEEP_STATES = load("keep_states")
TRIM_JOURNAL = load("trim_journal")
SEAL_JOURNAL = load("seal_journal")
ADD_STATISTICS = load("add_statistics")
TAKE_OWNERSHIP = load("take_ownership")
RELEASE_OWNERSHIP = load("release_ownership")
APPEND_FENCED = load("append_fenced")
KEEP_RECENT = load("keep_recent")
RAISE_LEVEL = load("raise_level")
BURST = load("burst")
END_WAVES = load("end_waves")
LEASE = load("lease")
WRITE = load("write")

ALL = (
    ACCEPT,
    ACCEPT_JOB,
    SETTLE,
    SETTLE_RECORDED,
    BEGIN_ATTEMPT,
    BEGIN_REQUESTS,
    ADD_JOB_EVENT,
    JOB_POSITION,
    ADD_JOB_RESPONSES,
    APPEND_PROGRESS,
    FORGET_ENDED,
    FORGET_SEQUENCES,
    KEEP_STATES,
    TRIM_JOURNAL,
    SEAL_JOURNAL,
    ADD_STATISTICS,
    TAKE_OWNERSHIP,
    RELEASE_OWNERSHIP,
    APPEND_FENCED,
    KEEP_RECENT,
    RAISE_LEVEL,
    BURST,
    END_WAVES,
    LEASE,
    WRITE,
)
