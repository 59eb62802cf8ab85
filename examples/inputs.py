"""The real inputs of the example models, as the arrays that a request carries.

Each function of `REQUESTS` returns one request's tensors by name, batch dimension included where the model has one.
What the models should answer is in ``expected.py``; how to read it is in ``decode.py``. Needs numpy only.
"""

from __future__ import annotations

import struct
import uuid
import wave
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

INPUTS = Path(__file__).resolve().parent / "inputs"
SAMPLE, VOICE, LINE, PAGE = (INPUTS / name for name in ("sample.py", "voice.wav", "line.png", "page.png"))

Tensors = dict[str, NDArray[np.generic]]


def file_features(content: bytes) -> NDArray[np.int32]:
    """INT32 [2048]: the input of ``magika`` for a file's content.

    The first 1,024 bytes after leading white space, padded behind, then the last 1,024 before trailing white space,
    padded in front. Only the 4,096 bytes at either end are looked at; the padding is 256.
    """
    first = list(content[:4096].lstrip()[:1024])
    last = list(content[-4096:].rstrip()[-1024:])
    padding = [256] * (2048 - len(first) - len(last))
    # One run of padding serves both halves: it stands behind the first bytes and in front of the last.
    return np.array(first + padding + last, dtype=np.int32)


def magika(path: Path = SAMPLE) -> Tensors:
    """``bytes`` INT32 [1, 2048]."""
    return {"bytes": file_features(path.read_bytes())[np.newaxis]}


def magika_features(path: Path = SAMPLE) -> Tensors:
    """``CONTENT`` BYTES [1, 1]: the file as it is."""
    content = np.empty((1, 1), dtype=np.object_)
    content[0, 0] = path.read_bytes()
    return {"CONTENT": content}


def samples(path: Path) -> NDArray[np.float32]:
    """FP32 [n] in [-1, 1): a WAV file, which must be mono, 16 bit, 16 kHz; ValueError for another one."""
    with wave.open(str(path), "rb") as clip:
        if (clip.getnchannels(), clip.getsampwidth(), clip.getframerate()) != (1, 2, 16_000):
            raise ValueError(f"{path} is not a mono, 16-bit, 16 kHz WAV file")
        return np.frombuffer(clip.readframes(clip.getnframes()), dtype="<i2").astype(np.float32) / 32768


def windows(clip: NDArray[np.float32]) -> NDArray[np.float32]:
    """FP32 [ceil(n / 512), 576]: each window is the 64 samples before it (zeros at the start) and 512 new ones."""
    padded = np.pad(clip, (64, -len(clip) % 512))
    return np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(padded, 576)[::512])


def silero_vad(path: Path = VOICE) -> Tensors:
    """``input`` FP32 [windows, 576]: a whole recording, which may also be sent in pieces of some windows each."""
    return {"input": windows(samples(path))}


def read_png(path: Path) -> NDArray[np.uint8]:
    """UINT8 [height, width, 3], blue first, of an 8-bit grey or RGB PNG without interlacing; else ValueError."""
    return png_pixels(path.read_bytes(), str(path))


def png_pixels(data: bytes, name: str) -> NDArray[np.uint8]:
    """The same for the content of a file that is called `name`."""
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError(f"{name} is not a PNG file")
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", data[16:29])
    if depth != 8 or colour not in (0, 2) or interlaced:
        raise ValueError(f"{name} is not an 8-bit grey or RGB PNG without interlacing")
    packed, at = b"", 8
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        if kind == b"IDAT":
            packed += data[at + 8 : at + 8 + size]
        at += size + 12
    channels = 1 if colour == 0 else 3
    pixels = _unfilter(zlib.decompress(packed), height, width * channels, channels).reshape(height, width, channels)
    return np.ascontiguousarray(np.broadcast_to(pixels, (height, width, 3))[:, :, ::-1])


def _unfilter(rows: bytes, height: int, row_bytes: int, step: int) -> NDArray[np.uint8]:
    """Undo PNG's line filters: each byte was stored as the difference to a prediction from its neighbours."""
    out = bytearray()
    above = bytearray(row_bytes)
    for row in range(height):
        start = row * (row_bytes + 1)
        kind, line = rows[start], bytearray(rows[start + 1 : start + 1 + row_bytes])
        for i in range(row_bytes if kind else 0):
            left, up = (line[i - step], above[i - step]) if i >= step else (0, 0)
            corner, up = up, above[i]
            if kind == 1:
                guess = left
            elif kind == 2:
                guess = up
            elif kind == 3:
                guess = (left + up) // 2
            else:
                towards = left + up - corner
                guess = min((left, up, corner), key=lambda near: abs(towards - near))
            line[i] = (line[i] + guess) & 0xFF
        out += line
        above = line
    return np.frombuffer(bytes(out), dtype=np.uint8)


def normalised(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """FP32 [3, height, width] in [-1, 1] from UINT8 [height, width, 3]."""
    return np.ascontiguousarray((image.astype(np.float32) / 127.5 - 1).transpose(2, 0, 1))


def resized(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """UINT8 [height, width, 3], each pixel mixed from its four neighbours in `image`."""
    if image.shape[:2] == (height, width):
        return image
    y = np.clip((np.arange(height) + 0.5) * image.shape[0] / height - 0.5, 0, image.shape[0] - 1)
    x = np.clip((np.arange(width) + 0.5) * image.shape[1] / width - 0.5, 0, image.shape[1] - 1)
    top, left = y.astype(int), x.astype(int)
    bottom, right = np.minimum(top + 1, image.shape[0] - 1), np.minimum(left + 1, image.shape[1] - 1)
    down, along = (y - top)[:, None, None], (x - left)[None, :, None]
    upper = image[top][:, left] * (1 - along) + image[top][:, right] * along
    lower = image[bottom][:, left] * (1 - along) + image[bottom][:, right] * along
    return np.round(upper * (1 - down) + lower * down).astype(np.uint8)


def line_tensor(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """FP32 [3, 48, width]: a line of text 48 pixels high, padded on the right to a multiple of 64 and to at least 320.

    Few widths make few shapes, and only requests of one shape share a batch.
    """
    width = max(1, round(image.shape[1] * 48 / image.shape[0]))
    line = normalised(resized(image, 48, width))
    return np.pad(line, ((0, 0), (0, 0), (0, max(320, -(-width // 64) * 64) - width)))


def ocr_rec(path: Path = LINE) -> Tensors:
    """``x`` FP32 [1, 3, 48, width]."""
    return {"x": line_tensor(read_png(path))[np.newaxis]}


def page_tensor(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """FP32 [3, height, width], both sides padded to a multiple of 32 with the page's last pixels."""
    height, width = image.shape[:2]
    return normalised(np.pad(image, ((0, -height % 32), (0, -width % 32), (0, 0)), mode="edge"))


def ocr_det(path: Path = PAGE) -> Tensors:
    """``x`` FP32 [1, 3, height, width]."""
    return {"x": page_tensor(read_png(path))[np.newaxis]}


def ocr(path: Path = PAGE) -> Tensors:
    """``IMAGE`` BYTES [1]: the file as it is."""
    content = np.empty(1, dtype=np.object_)
    content[0] = path.read_bytes()
    return {"IMAGE": content}


def identity() -> Tensors:
    """``INPUT0`` FP32 [1, 16]."""
    return {"INPUT0": np.arange(16, dtype=np.float32)[np.newaxis] / 8 - 1}


def sequence(model: str) -> dict[str, str | bool]:
    """The parameters of a request that is a whole sequence, for the models that want one; {} for others."""
    if model not in SEQUENTIAL:
        return {}
    return {"sequence_id": uuid.uuid4().hex, "sequence_start": True, "sequence_end": True}


SEQUENTIAL = frozenset({"silero_vad"})
"""The models that take sequences of requests."""

REQUESTS: dict[str, Callable[[], Tensors]] = {
    "magika": magika,
    "magika_features": magika_features,
    "silero_vad": silero_vad,
    "ocr_det": ocr_det,
    "ocr_rec": ocr_rec,
    "ocr": ocr,
    "identity": identity,
}

FROM_FILE: dict[str, Callable[[Path], Tensors]] = {
    "magika": magika,
    "magika_features": magika_features,
    "silero_vad": silero_vad,
    "ocr_det": ocr_det,
    "ocr_rec": ocr_rec,
    "ocr": ocr,
}
"""The same for a file of one's own."""
