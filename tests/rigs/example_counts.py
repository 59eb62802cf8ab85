"""How many examples Hypothesis tries: all that a test asks for, or the share that `CHARONIA_TEST_EXAMPLES` names.

`make check` runs at each step of a change and tries a tenth of them, `make test` a fifth; `make test-long` tries all.
"""

from __future__ import annotations

import os

_SHARE = float(os.environ.get("CHARONIA_TEST_EXAMPLES", "1"))
_FEWEST = 10


def examples(whole: int) -> int:
    return whole if _SHARE >= 1 else max(_FEWEST, int(whole * _SHARE))
