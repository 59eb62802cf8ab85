"""The process that converts one GGUF file: `python -m executors.backends.llm.conversion_process FILE`.

FILE is a link, or a copy, in an otherwise empty directory: the library writes what it makes beside it. A process of its
own, because the library keeps the memory, and its threads the cores, that a conversion takes.

The library rounds zero points to whole numbers, which changes what models with Q4_1 weights say: they are put right.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .zero_points import correct_zero_points


def main(words: list[str]) -> int:
    """Convert. Returns the exit status; the reason of a failure is the last line of stderr."""
    try:
        import openvino_genai
    except ImportError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    try:
        openvino_genai.LLMPipeline(words[0], "CPU", enable_save_ov_model=True)
        correct_zero_points(Path(words[0]).parent / "openvino_model.xml", Path(words[0]))
    except Exception as error:  # of the library, of several types
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        sys.stderr.write(f"{lines[-1] if lines else type(error).__name__}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
