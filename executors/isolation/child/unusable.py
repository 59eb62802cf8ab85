"""Ends the process of an isolated model whose instance can no longer be used: its executor starts another one."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

_UNUSABLE = 70
"""Exit status of a process whose instance says that it cannot be used any more."""


def end_process(model: str, death: BaseException) -> NoReturn:
    """End at once, without joins: what runs meanwhile in other threads is lost with the process. Never returns."""
    sys.stderr.write(f"an instance of model '{model}' cannot be used any more: {death}\n")
    sys.stderr.flush()
    os._exit(_UNUSABLE)
