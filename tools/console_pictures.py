"""Makes the pictures of `docs/howto/console.md` of those that `make test-console` left in `build/console`.

Cuts them to a height, and those that are large to 256 colours. Look at them before they go into the repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
MADE, KEPT = ROOT / "build" / "console", ROOT / "docs" / "howto" / "pictures"
MOST_BYTES = 150_000
PICTURES = {
    "overview": ("overview-1280-light", 780),
    "models": ("models-1280-dark", 320),
    "model": ("model-1280-light", 1000),
    "request": ("request-waiting-1280-light", 700),
    "timeline": ("request-poison-1280-light", 1100),
    "jobs": ("jobs-1280-light", 620),
    "dead-letters": ("dead-letters-1280-light", 300),
    "dead-letter": ("dead-letter-1280-light", 620),
    "question": ("action-question-1280-light", 260),
    "queue": ("action-queue-1280-light", 1240),
    "streams": ("streams-1280-dark", 260),
    "phone": ("overview-390-dark", 860),
}
"""By the name in the docs: the picture, and how much of its height is kept, in pixels."""


def main() -> int:
    too_large = []
    for name, (source, height) in PICTURES.items():
        with Image.open(MADE / f"{source}.png") as whole:
            cut = whole.convert("RGB").crop((0, 0, whole.width, min(height, whole.height)))
        target = KEPT / f"console-{name}.png"
        cut.save(target, optimize=True)
        if target.stat().st_size > MOST_BYTES // 2:
            few = cut.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)  # which keeps rare colours
            few.save(target, optimize=True)
        size = target.stat().st_size
        print(f"{target.name}: {cut.width} x {cut.height}, {size:,} bytes")
        if size > MOST_BYTES:
            too_large.append(target.name)
    if too_large:
        print(f"larger than {MOST_BYTES:,} bytes: {', '.join(too_large)}", file=sys.stderr)
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
