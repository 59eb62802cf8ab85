"""Ask a running server which digits are on pictures, with tritonclient.

``python examples/digits.py [--protocol grpc] [--url localhost:8001] [PICTURE.png ...]``

The model is ``digits`` of ``examples/models_digits``. A picture is an 8-bit PNG file of one digit, bright on dark, that
fills it. Without any, ten of scikit-learn's pictures are sent that the models were not trained on.
"""

from __future__ import annotations

import argparse
import struct
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from client import PORTS, Server
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException


def png_file(pixels: NDArray[np.uint8]) -> bytes:
    """A grey PNG file of UINT8 [height, width]."""
    height, width = pixels.shape

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def images(files: Sequence[bytes]) -> NDArray[np.object_]:
    """BYTES [n, 1]: what the model takes."""
    found = np.empty((len(files), 1), np.object_)
    found[:, 0] = files
    return found


def _given(paths: Sequence[Path]) -> dict[str, bytes]:
    """PNG files by what is said of them."""
    if paths:
        return {str(path): path.read_bytes() for path in paths}
    from build_digit_models import HELD_OUT, pictures

    pixels, digits = (array[-HELD_OUT:][:10] for array in pictures())
    return {f"picture {n}, a {digit}": png_file(pixels[n]) for n, digit in enumerate(digits.tolist())}


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each picture; a refusal or an unreachable server is one on stderr and exit status 1."""
    parser = argparse.ArgumentParser(description="Ask a running server which digits are on pictures.")
    parser.add_argument("--protocol", choices=sorted(PORTS), default="http")
    parser.add_argument("--url", help="HOST:PORT of the server (default: localhost and the protocol's usual port)")
    parser.add_argument("picture", nargs="*", type=Path, help="PNG files (default: ten of scikit-learn's digits)")
    options = parser.parse_args(arguments)
    server = Server(options.protocol, options.url or f"localhost:{PORTS[options.protocol]}")
    try:
        given = _given(options.picture)
        answers = server.infer("digits", {"IMAGE": images(list(given.values()))})["PROBABILITIES"]
    except (InferenceServerException, OSError) as error:
        print(f"digits: {error}", file=sys.stderr)
        return 1
    finally:
        server.close()
    for name, row in zip(given, answers, strict=True):
        print(f"{name}: {row.argmax()} ({row.max():.0%})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
