"""Becomes `charonia serve` after asking the kernel for SIGTERM when its parent ends, so that a tuner that is killed
leaves no server. `trial_server` starts it as a program, with the parent's process id and the arguments of `serve`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, arguments: list[str]) -> None:
    """Does not return. The wish of the kernel outlasts the change of programs."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent_pid:
            sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "charonia.cli", "serve", *arguments])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
