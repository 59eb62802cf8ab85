"""The supervisor of `serve` starts at once: it imports nothing but the standard library and light parts of ours."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
before = set(sys.modules)
import charonia.cli, charonia.composition.supervisor
roots = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(root for root in roots if root not in sys.stdlib_module_names))
"""


def test_the_supervisor_needs_no_library() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == "['charonia', 'executors']\n"
