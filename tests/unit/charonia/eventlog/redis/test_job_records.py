"""The fields of a job's record."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.eventlog.redis.stored_records import FIELDS, STATE_CODES, fields_of, record_of, told
from charonia.facts.jobs import JobState, NewJob


def stored(job: NewJob, durability: str = "memory") -> dict[bytes, bytes]:
    """The hash as the server has it."""
    texts = [part if isinstance(part, bytes) else str(part).encode() for part in fields_of(job, durability)]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def values(fields: dict[bytes, bytes]) -> list[bytes | None]:
    return [fields.get(name) for name in FIELDS]


def test_a_queued_job_comes_back() -> None:
    job = NewJob(b"i" * 16, 100, 123, 60, "té", b"k" * 16, b"d" * 16, {"webhook": {"url": "u"}})
    record = record_of("m", job.id, values(stored(job, "replicated:2")))
    assert (record.model, record.id, record.state, record.tenant) == ("m", job.id, JobState.QUEUED, "té")
    assert (record.size_bytes, record.accepted_us, record.retention_s, record.durability) == (
        100,
        123,
        60,
        "replicated:2",
    )
    assert (record.attempts, record.result_size_bytes, record.ended_us, record.events) == (0, 0, 0, ())
    assert record.about == job.about
    assert stored(job)[b"w"] == b"1"
    assert b"w" not in stored(NewJob(b"i" * 16, 1, 1, 1, about={"webhook": None}))


@given(st.integers(0, 240))
def test_what_is_usual_fits_the_short_encoding(length: int) -> None:
    job = NewJob(b"i" * 16, 10**9, 10**16, 10**8, "t" * 64, b"k" * 16, b"d" * 16, {"t": "x" * length})
    assert max(map(len, stored(job).values())) <= 64
    assert record_of("m", job.id, values(stored(job))).about == job.about


def test_what_is_long_is_kept_whole() -> None:
    job = NewJob(b"i" * 16, 1, 1, 1, about={"t": "x" * 5000})
    assert record_of("m", job.id, values(stored(job))).about == job.about


def test_events_are_numbered_from_the_one_that_is_not_kept() -> None:
    job = NewJob(b"i" * 16, 1, 77, 1)
    event = b"\x93" + msgpack.packb(99) + told("batched", {"executor": "x"})
    record = record_of("m", job.id, values(stored(job)), [event])
    assert [(e.number, e.kind, e.time_us, e.detail) for e in record.events] == [
        (1, "accepted", 77, {}),
        (2, "batched", 99, {"executor": "x"}),
    ]


@pytest.mark.parametrize("state", JobState)
def test_every_state_has_its_code(state: JobState) -> None:
    fields = stored(NewJob(b"i" * 16, 1, 1, 1)) | {b"s": STATE_CODES[state]}
    assert record_of("m", b"i" * 16, values(fields)).state is state
