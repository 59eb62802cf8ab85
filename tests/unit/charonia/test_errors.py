"""The error tree: one class for each code, and codes that keep their numbers."""

from __future__ import annotations

import errno

import pytest

from charonia.errors import (
    MAX_MESSAGE_CHARACTERS,
    CharoniaError,
    ConfigError,
    ErrorCode,
    InternalError,
    InvalidArgument,
    LogUnavailable,
    ResourceExhausted,
    Unavailable,
    UnknownError,
    class_of_failure,
    without_credentials,
)
from charonia.eventlog.redis.server.transport import Refused


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ResourceExhausted("full"), ResourceExhausted),
        (LogUnavailable("away"), LogUnavailable),
        (MemoryError(), Unavailable),
        (TimeoutError(), Unavailable),
        (OSError(errno.EMFILE, "Too many open files"), Unavailable),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), Unavailable),
        (RuntimeError("can't start new thread"), Unavailable),
        (RuntimeError("generator raised StopIteration"), InternalError),
        (FileNotFoundError(errno.ENOENT, "No such file"), InternalError),
        (KeyError("x"), InternalError),
    ],
)
def test_what_a_machine_has_no_room_for_may_succeed_later(error: Exception, kind: type[CharoniaError]) -> None:
    assert class_of_failure(error) is kind


def test_numbers_are_never_given_anew() -> None:
    assert [(code.name, code.value) for code in ErrorCode] == [
        ("UNKNOWN", 0),
        ("INTERNAL", 1),
        ("NOT_FOUND", 2),
        ("INVALID_ARG", 3),
        ("UNAVAILABLE", 4),
        ("UNSUPPORTED", 5),
        ("ALREADY_EXISTS", 6),
        ("CANCELLED", 7),
        ("RESOURCE_EXHAUSTED", 8),
        ("DEADLINE_EXCEEDED", 9),
        ("UNAUTHENTICATED", 10),
        ("PERMISSION_DENIED", 11),
        ("KEY_REUSED", 12),
    ]


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_its_class_and_title(code: ErrorCode) -> None:
    error = CharoniaError.of(int(code), "why")
    assert (error.code, error.message, str(error)) == (code, "why", "why")
    assert code.title
    assert code.title[0].isupper()


def test_a_code_of_a_newer_peer_is_unknown() -> None:
    assert type(CharoniaError.of(99, "why")) is UnknownError


def test_special_cases_keep_their_parents_code() -> None:
    assert ConfigError("x").code is InvalidArgument.code
    assert LogUnavailable("x").code is ErrorCode.UNAVAILABLE
    assert ErrorCode.INVALID_ARG.title == "Invalid argument"


def test_an_error_anew_is_equal_and_holds_on_to_nothing() -> None:
    for error in (ResourceExhausted("full"), Refused("NOREPLICAS Not enough good replicas to write.")):
        if isinstance(error, ResourceExhausted):
            error.retry_after_s = 3
        try:
            raise error from ValueError("another")
        except CharoniaError:
            again = error.again()
        assert (type(again), str(again), again.message, vars(again)) == (
            type(error),
            str(error),
            error.message,
            vars(error),
        )
        assert again.__traceback__ is again.__cause__ is again.__context__ is None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host:8000/v2", "http://host:8000/v2"),
        ("host:8000", "host:8000"),
        ("http://me:secret@host:8000/v2", "http://***@host:8000/v2"),
        ("me:secret@host:8000", "***@host:8000"),
        ("redis+sentinel://:secret@a:1,b:2/jobs", "redis+sentinel://***@a:1,b:2/jobs"),
        ("s3://https://me:secret@host/bucket", "s3://https://***@host/bucket"),
        ("http://me:s/e?c#r@e\nt@host", "http://***@host"),
        ("redis:/me:secret@host", "redis:/***@host"),
        ("unix://me:secret@/run/log", "unix://***@/run/log"),
    ],
)
def test_urls_are_shown_without_credentials(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


def test_a_text_without_end_is_cut() -> None:
    whole = "x" * MAX_MESSAGE_CHARACTERS
    assert InvalidArgument(whole).message == whole
    cut = InvalidArgument(whole + "yz")
    assert (cut.message, str(cut.again())) == (whole + "…", whole + "…")
