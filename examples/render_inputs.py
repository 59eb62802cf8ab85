"""Draw and speak the binary files under ``examples/inputs`` (they are committed; run this only to change them).

Needs Pillow, numpy, the DejaVu fonts (Debian: ``fonts-dejavu-core``) and ``espeak-ng`` on PATH. The drawn text and the
instants at which speech starts and ends are answers that ``expected.py`` states; change both together.
"""

from __future__ import annotations

import io
import subprocess
import wave
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

INPUTS = Path(__file__).resolve().parent / "inputs"
FONTS = Path("/usr/share/fonts/truetype/dejavu")

LINE_TEXT = "Charonia tritonis, 3 shells"
PAGE_LINES = (
    (40, 40, 34, "The trumpet of Triton"),
    (40, 120, 22, "A record laid down turn by turn"),
    (40, 176, 22, "and never rewritten."),
    (300, 280, 26, "Invoice 20417"),
)
SPOKEN = "The shell sounds, and the sea answers."

RATE_HZ = 16_000
CLIP_SAMPLES = 3 * RATE_HZ
SPEECH_STARTS_AT = RATE_HZ // 2


def draw_line(path: Path) -> None:
    """Draw `LINE_TEXT` 48 pixels high, the height the recognition model takes, dark on light grey."""
    font = ImageFont.truetype(str(FONTS / "DejaVuSans.ttf"), 30)
    image = Image.new("L", (int(font.getlength(LINE_TEXT)) + 16, 48), 235)
    ImageDraw.Draw(image).text((8, 6), LINE_TEXT, font=font, fill=25)
    image.save(path, optimize=True)


def draw_page(path: Path) -> None:
    """Draw `PAGE_LINES` (x, y, size in pixels, text) on a 640 x 352 page; both sides are multiples of 32."""
    image = Image.new("L", (640, 352), 245)
    draw = ImageDraw.Draw(image)
    for x, y, size, text in PAGE_LINES:
        draw.text((x, y), text, font=ImageFont.truetype(str(FONTS / "DejaVuSerif.ttf"), size), fill=20)
    image.save(path, optimize=True)


def speak(path: Path) -> None:
    """Speak `SPOKEN` and write 3 s of mono 16-bit 16 kHz audio: half a second of silence, the sentence, silence."""
    spoken = subprocess.run(
        ["espeak-ng", "-v", "en-gb", "-s", "170", "--stdout", SPOKEN], check=True, capture_output=True
    )
    with wave.open(io.BytesIO(spoken.stdout)) as source:
        rate_hz = source.getframerate()
        samples = np.frombuffer(spoken.stdout[44:], dtype="<i2").astype(np.float64)
    # Resample in the frequency domain: drop the bins above the new Nyquist frequency.
    wanted = round(len(samples) * RATE_HZ / rate_hz)
    resampled = np.fft.irfft(np.fft.rfft(samples)[: wanted // 2 + 1], n=wanted) * (wanted / len(samples))
    voiced = np.flatnonzero(np.abs(resampled) > 200)
    resampled = resampled[voiced[0] : voiced[-1] + 1]
    clip = np.zeros(CLIP_SAMPLES)
    clip[SPEECH_STARTS_AT : SPEECH_STARTS_AT + len(resampled)] = resampled
    print(f"speech from {SPEECH_STARTS_AT / RATE_HZ:.2f} s to {(SPEECH_STARTS_AT + len(resampled)) / RATE_HZ:.2f} s")
    with wave.open(str(path), "wb") as target:
        target.setnchannels(1)
        target.setsampwidth(2)
        target.setframerate(RATE_HZ)
        target.writeframes(np.clip(np.round(clip), -32768, 32767).astype("<i2").tobytes())


if __name__ == "__main__":
    draw_line(INPUTS / "line.png")
    draw_page(INPUTS / "page.png")
    speak(INPUTS / "voice.wav")
