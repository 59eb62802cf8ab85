"""Make the example scripts importable the way they import one another: by bare name."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))
