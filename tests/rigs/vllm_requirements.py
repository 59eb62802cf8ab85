"""Prints what vLLM's wheel in a directory requires, but for what its engine does without on CPUs: `make test-vllm`.

`python tests/rigs/vllm_requirements.py DIRECTORY`
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

_WITHOUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
"""torch is installed before, from the usual index: its version has no local part there."""


def main(directory: Path) -> None:
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (one for one in opened.namelist() if one.endswith(".dist-info/METADATA"))
        lines = opened.read(name).decode().splitlines()
    for line in lines:
        requirement = line.removeprefix("Requires-Dist: ")
        found = re.match(r"[\w.-]+", requirement)
        if requirement != line and found and found[0] not in _WITHOUT and "extra ==" not in requirement:
            print(requirement)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
