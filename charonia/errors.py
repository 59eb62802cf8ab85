"""Every failure a caller may see, as one tree; each error carries a neutral code that a transport maps to its own.

Pure.

    CharoniaError                   code     (HTTP / gRPC: interface items E1-E3; the last five are Charonia's own)
    ├── UnknownError                UNKNOWN             400 / 2   UNKNOWN
    ├── InternalError               INTERNAL            500 / 13  INTERNAL
    ├── NotFound                    NOT_FOUND           404 / 5   NOT_FOUND
    ├── InvalidArgument             INVALID_ARG         400 / 3   INVALID_ARGUMENT
    │   └── ConfigError             INVALID_ARG         (structural: the repository answers C62's generic 500)
    ├── Unavailable                 UNAVAILABLE         503 / 14  UNAVAILABLE
    │   ├── LogUnavailable          UNAVAILABLE         the log cannot be reached: the outcome is unknown
    │   └── StreamInterrupted       UNAVAILABLE         some responses were seen, no others will come
    ├── Unsupported                 UNSUPPORTED         501 / 12  UNIMPLEMENTED
    ├── AlreadyExists               ALREADY_EXISTS      400 / 6   ALREADY_EXISTS
    ├── Cancelled                   CANCELLED           400 / 1   CANCELLED
    ├── ResourceExhausted           RESOURCE_EXHAUSTED  429 / 8   RESOURCE_EXHAUSTED
    ├── DeadlineExceeded            DEADLINE_EXCEEDED   504 / 4   DEADLINE_EXCEEDED
    ├── Unauthenticated             UNAUTHENTICATED     401 / 16  UNAUTHENTICATED
    ├── PermissionDenied            PERMISSION_DENIED   403 / 7   PERMISSION_DENIED
    └── KeyReused                   KEY_REUSED          422 / 9   FAILED_PRECONDITION (an Idempotency-Key, another body)

`StartupError` stands apart: it is a sentence for the operator, printed once on stderr, never sent to a client.
This module knows no transport; the maps live in `gateway.http.codec.error_replies` and `gateway.grpc.statuses`.
"""

from __future__ import annotations

import errno
import re
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, NoReturn

if TYPE_CHECKING:
    from typing import Self  # not in Python 3.10, which processes of python models may have

CANCELLED = "request was cancelled"
DEADLINE_EXCEEDED = "request deadline exceeded"
EPOCH_CHANGED = "the log epoch changed while the request was in flight: its outcome is unknown"
NOT_READY = "Request for unknown model: '{model}' version {version} is not at ready state"
OUTCOME_UNKNOWN = "the request or its reply was lost while it was in flight: its outcome is unknown"
SERVER_EXITING = "Server exiting"
"""E7."""

MAX_MESSAGE_CHARACTERS = 1 << 20
"""A model may raise an error with any text, and the log takes no record without end."""


class ErrorCode(IntEnum):
    """Neutral codes; the numbers are Charonia's wire form (append-only, never renumbered)."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7
    RESOURCE_EXHAUSTED = 8
    DEADLINE_EXCEEDED = 9
    UNAUTHENTICATED = 10
    PERMISSION_DENIED = 11
    KEY_REUSED = 12

    @property
    def title(self) -> str:
        """The words Triton prints before a reason in a load failure (interface item C62): "Invalid argument"."""
        return _TITLES[self]


class CharoniaError(Exception):
    """Base of the tree. `message` is what the client reads, with no code in it (interface item E3)."""

    code: ClassVar[ErrorCode] = ErrorCode.UNKNOWN
    receipt: str = ""
    """What the failed request has used, where it asked for that: a JSON object as text, in ASCII (ADR 0055)."""

    def __init__(self, message: str) -> None:
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = message[:MAX_MESSAGE_CHARACTERS] + "…"
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def again(self) -> Self:
        """An equal error that was not raised yet, without a traceback and what that holds on to."""
        made = type(self).__new__(type(self), *self.args)
        made.__dict__.update(self.__dict__)
        return made

    @staticmethod
    def of(code: ErrorCode | int, message: str) -> CharoniaError:
        """The error class of a neutral code; an unknown number (a newer peer) becomes `UnknownError`."""
        return _BY_CODE.get(int(code), UnknownError)(message)


class UnknownError(CharoniaError):
    code = ErrorCode.UNKNOWN


class InternalError(CharoniaError):
    code = ErrorCode.INTERNAL


class NotFound(CharoniaError):
    code = ErrorCode.NOT_FOUND


class InvalidArgument(CharoniaError):
    code = ErrorCode.INVALID_ARG


class ConfigError(InvalidArgument):
    """A model configuration that cannot be used; the message says which field and why."""


class Unavailable(CharoniaError):
    code = ErrorCode.UNAVAILABLE


class LogUnavailable(Unavailable):
    """The event log could not be reached or refused the command; whether the work was taken is unknown."""


class LogAway(LogUnavailable):
    """There was no connection to the event log, so the command was not sent."""


class LogRefused(LogUnavailable):
    """The event log refused the command: nothing of it was done. `passes`: it may take the same one later. `denied`:
    this process may not give it such commands.
    """

    passes: bool = True
    denied: bool = False


class StreamInterrupted(Unavailable):
    """A request of which responses were seen cannot go on: another run must not go on for the first.

    The message begins with `STREAM_INTERRUPTED: `, by which callers know it, however often it is
    made again from its own message.
    """

    PREFIX: ClassVar[str] = "STREAM_INTERRUPTED: "

    def __init__(self, reason: str) -> None:
        super().__init__(reason if reason.startswith(self.PREFIX) else self.PREFIX + reason)


class Unsupported(CharoniaError):
    code = ErrorCode.UNSUPPORTED


class AlreadyExists(CharoniaError):
    code = ErrorCode.ALREADY_EXISTS


class Cancelled(CharoniaError):
    code = ErrorCode.CANCELLED


class ResourceExhausted(CharoniaError):
    """A bound is reached. `retry_after_s` is a hint for the client, the same for every bound."""

    code = ErrorCode.RESOURCE_EXHAUSTED
    retry_after_s: int = 1


class DeadlineExceeded(CharoniaError):
    code = ErrorCode.DEADLINE_EXCEEDED


class Unauthenticated(CharoniaError):
    code = ErrorCode.UNAUTHENTICATED


class PermissionDenied(CharoniaError):
    code = ErrorCode.PERMISSION_DENIED


class KeyReused(CharoniaError):
    """An Idempotency-Key came again with another request."""

    code = ErrorCode.KEY_REUSED


_EXHAUSTED = frozenset((errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_NO_THREAD = "can't start new thread"
"""What Python's `RuntimeError` says."""


def class_of_failure(error: BaseException) -> type[CharoniaError]:
    """Returns the class of the error that stands for an exception in our own code; `error_of_model` is for models.

    `Unavailable` where the machine is out of time, memory, threads or descriptors: the same request may succeed later.
    """
    if isinstance(error, CharoniaError):
        return type(error)
    if isinstance(error, (MemoryError, TimeoutError)) or (isinstance(error, OSError) and error.errno in _EXHAUSTED):
        return Unavailable
    if isinstance(error, RuntimeError) and str(error).startswith(_NO_THREAD):
        return Unavailable
    return InternalError


def as_error(error: BaseException) -> CharoniaError:
    """Returns an exception that is ours as it is, and for another one an error of `class_of_failure` with its text."""
    return error if isinstance(error, CharoniaError) else class_of_failure(error)(f"{type(error).__name__}: {error}")


def error_of_model(error: BaseException) -> CharoniaError:
    """Returns an exception that a model's code has raised: one that is ours as it is, and for another one an
    `InternalError` with its text, as Triton does for any. A model that waited in vain, or wanted more memory than there
    is, has failed: which of its requests would succeed later is not known.
    """
    if not isinstance(error, CharoniaError):
        return InternalError(escaped(f"{type(error).__name__}: {error}"))
    return error if is_unicode(error.message) else CharoniaError.of(error.code, escaped(error.message))


def escaped(text: str) -> str:
    """Returns a text that can be sent (`is_unicode`), with escapes in place of halves of pairs of surrogates."""
    return text.encode(errors="backslashreplace").decode()


ENCODE_CREDENTIALS = (
    "its user or password holds a character that must be percent-encoded, such as / ? # or [, or does not lie between "
    "// and @"
)


def without_credentials(url: str) -> str:
    """Returns a URL as messages show it: `***` in the place of a user and password.

    They may hold characters that should have been percent-encoded, so all before the last "@" counts as theirs.
    """
    return _CREDENTIALS.sub(r"\1***@", url, count=1)


_CREDENTIALS = re.compile(r"\A((?:[a-z][a-z0-9+.-]*:/+)*).*@", re.IGNORECASE | re.DOTALL)


def path_without_credentials(path: str) -> str:
    """Returns a path as messages show it; one that is a URL, given by mistake, as `without_credentials` does."""
    return without_credentials(path) if ":/" in path else path


def refuse_passphrase() -> NoReturn:
    """Called by ssl for a key with a passphrase, which OpenSSL would ask for at the terminal or the standard input, and
    wait. Raises `OSError`.
    """
    raise OSError("the key has a passphrase, which is not asked for: write it to its file without one")


def is_unicode(text: str) -> bool:
    """Returns whether a text can be sent: not with half of a pair of surrogates, as in names of files that are any
    bytes.
    """
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parameter_fault(key: object, value: object) -> str:
    """Returns what keeps a response parameter from being sent, as words that follow "is"; "" where nothing does.

    Records and the frames of model processes are msgpack, whose integers have 64 bits and whose texts are UTF-8.
    """
    if not isinstance(key, str) or not isinstance(value, (str, int, float)):
        return f"a {type(value).__name__}: names are str, values str, int, bool or float"
    if not is_unicode(key) or (isinstance(value, str) and not is_unicode(value)):
        return "no Unicode text: names and values may not have half of a pair of surrogates"
    if isinstance(value, int) and not _MIN_INTEGER <= value <= _MAX_INTEGER:
        return f"an int out of range: it may be from {_MIN_INTEGER} to {_MAX_INTEGER}"
    return ""


_MIN_INTEGER, _MAX_INTEGER = -(1 << 63), (1 << 64) - 1


def shed(error: CharoniaError) -> CharoniaError:
    """Returns an equal error without a traceback.

    A future keeps what it raised, and with a traceback that would be a cycle: the request's bytes would stay until the
    garbage collector comes by, which it seldom does.
    """
    error.__traceback__ = None
    return error.again()


class StartupError(Exception):
    """A service cannot start: one clear sentence for stderr and a non-zero exit, never a traceback."""


class InvalidRecord(Exception):
    """Bytes in the log that are no record of a version this process knows: quarantined by the reader, never a crash."""


_TITLES = {
    ErrorCode.UNKNOWN: "Unknown",
    ErrorCode.INTERNAL: "Internal",
    ErrorCode.NOT_FOUND: "Not found",
    ErrorCode.INVALID_ARG: "Invalid argument",
    ErrorCode.UNAVAILABLE: "Unavailable",
    ErrorCode.UNSUPPORTED: "Unsupported",
    ErrorCode.ALREADY_EXISTS: "Already exists",
    ErrorCode.CANCELLED: "Cancelled",
    ErrorCode.RESOURCE_EXHAUSTED: "Resource exhausted",
    ErrorCode.DEADLINE_EXCEEDED: "Deadline exceeded",
    ErrorCode.UNAUTHENTICATED: "Unauthenticated",
    ErrorCode.KEY_REUSED: "Key reused",
    ErrorCode.PERMISSION_DENIED: "Permission denied",
}

_BY_CODE: dict[int, type[CharoniaError]] = {
    int(cls.code): cls
    for cls in (
        UnknownError,
        InternalError,
        NotFound,
        InvalidArgument,
        Unavailable,
        Unsupported,
        AlreadyExists,
        Cancelled,
        ResourceExhausted,
        DeadlineExceeded,
        Unauthenticated,
        PermissionDenied,
        KeyReused,
    )
}
