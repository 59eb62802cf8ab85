"""Errors that futures keep, without what they hold on to."""

from __future__ import annotations

from charonia.errors import CharoniaError


def shed(error: CharoniaError) -> CharoniaError:
    """The error, stripped of its traceback. A future keeps what it raised, and with a traceback that would be a cycle:
    the request's bytes would stay until the garbage collector comes by, which it seldom does.
    """
    error.__traceback__ = None
    return error.again()
