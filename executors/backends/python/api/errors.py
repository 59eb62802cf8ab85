"""Errors of model code: the exception it raises, and the error object it puts into a response (P10, P12)."""

from __future__ import annotations

from charonia.errors import ErrorCode

_instance = ""


def set_instance(name: str) -> None:
    """Set the name of the model instance of this process. Internal."""
    global _instance
    _instance = name


def refused(what: str, why: str) -> TritonModelException:
    """The error of something that Triton asks its server for: `what` failed, the server says `why`. Internal."""
    return TritonModelException(f"{what}: {failure_text(why)}")


def failure_text(why: str) -> str:
    """The text of an error that this server finds in what the model did for one request. Internal."""
    return f"Failed to process the request for model '{_instance}', message: {why}"


class TritonModelException(Exception):
    """Raised by `triton_python_backend_utils`, and by models, to fail a load or a whole batch (P12)."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self._message = message

    def message(self) -> str:
        return self._message


class TritonError:
    """Fails one request, as the `error` of its response (P10)."""

    UNKNOWN = int(ErrorCode.UNKNOWN)
    INTERNAL = int(ErrorCode.INTERNAL)
    NOT_FOUND = int(ErrorCode.NOT_FOUND)
    INVALID_ARG = int(ErrorCode.INVALID_ARG)
    UNAVAILABLE = int(ErrorCode.UNAVAILABLE)
    UNSUPPORTED = int(ErrorCode.UNSUPPORTED)
    ALREADY_EXISTS = int(ErrorCode.ALREADY_EXISTS)
    CANCELLED = int(ErrorCode.CANCELLED)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        # besides Triton's codes, those of this server's other errors, which called models may return
        if not TritonError.UNKNOWN <= code <= max(ErrorCode):
            code = TritonError.UNKNOWN
        self._message = str(message)
        self._code = int(code)

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    def __str__(self) -> str:
        return self._message
