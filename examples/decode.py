"""Read the example models' answers: file types, speech segments, boxes around text, text. Needs numpy only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WINDOW_S = 512 / 16_000
"""Seconds between two speech probabilities."""


def read_labels(path: Path) -> list[str]:
    """The labels of a label file, one on each line. Only line feeds part them: a label may be a space."""
    return path.read_bytes().decode().removesuffix("\n").split("\n")


def speech_segments(probabilities: NDArray[np.float32], threshold: float = 0.5) -> list[tuple[float, float]]:
    """Begin and end in seconds of each run of windows over `threshold`, from FP32 [windows].

    Runs less than 0.1 s apart are one.
    """
    voiced = np.concatenate(([False], np.asarray(probabilities) > threshold, [False]))
    edges = np.flatnonzero(voiced[1:] != voiced[:-1]).reshape(-1, 2) * WINDOW_S
    segments: list[tuple[float, float]] = []
    for begin, end in edges.tolist():
        if segments and begin - segments[-1][1] < 0.1:
            segments[-1] = (segments[-1][0], end)
        else:
            segments.append((begin, end))
    return segments


def timeline(probabilities: NDArray[np.float32]) -> str:
    """One character for each window, from ``_`` (silence) to a full block (speech)."""
    levels = "_▁▂▃▄▅▆▇█"
    return "".join(levels[round(float(p) * (len(levels) - 1))] for p in np.clip(probabilities, 0, 1))


def read_text(scores: NDArray[np.float32], labels: list[str]) -> tuple[str, float]:
    """Text and mean confidence from FP32 [steps, characters] (greedy CTC).

    The best character of each step, without repetitions and without the blank, which is index 0.
    """
    best = scores.argmax(axis=-1)
    kept = best != 0
    kept[1:] &= best[1:] != best[:-1]
    confidence = float(scores.max(axis=-1)[kept].mean()) if kept.any() else 0.0
    return "".join(labels[index] for index in best[kept]), confidence


def text_boxes(probabilities: NDArray[np.float32], threshold: float = 0.3) -> list[tuple[int, int, int, int]]:
    """Left, top, right, bottom in pixels of each line of text, from FP32 [height, width], top to bottom.

    The model marks the core of each line, so the box of each connected region grows by 1.6 times its area over its
    perimeter. Regions under 3 pixels high or wide, or with a mean probability under 0.5, are dropped.
    """
    height, width = probabilities.shape
    unseen = probabilities > threshold
    boxes = []
    for y, x in np.argwhere(unseen).tolist():
        if not unseen[y, x]:
            continue
        unseen[y, x] = False
        region = [(y, x)]
        for row, column in region:  # grows while it is walked
            for near in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
                if 0 <= near[0] < height and 0 <= near[1] < width and unseen[near]:
                    unseen[near] = False
                    region.append(near)
        rows, columns = np.array(region).T
        high, wide = int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1
        if min(high, wide) < 3 or probabilities[rows, columns].mean() < 0.5:
            continue
        grow = round(1.6 * high * wide / (2 * (high + wide)))
        left, top = int(columns.min()) - grow, int(rows.min()) - grow
        right, bottom = int(columns.max()) + 1 + grow, int(rows.max()) + 1 + grow
        boxes.append((max(0, left), max(0, top), min(width, right), min(height, bottom)))
    return sorted(boxes, key=lambda box: (box[1], box[0]))


def best_labels(scores: NDArray[np.float32], labels: list[str], count: int = 3) -> list[tuple[str, float]]:
    """The `count` best labels with their scores, from FP32 [labels]."""
    return [(labels[index], float(scores[index])) for index in np.argsort(-scores, kind="stable")[:count]]


def describe(model: str, outputs: dict[str, NDArray[np.generic]], models: Path) -> str:
    """Say what a model's answer to one input means; label files come from the repository `models`."""
    if model == "magika":
        row = outputs["target_label"][0]
        if row.dtype == np.object_:  # classification strings, "score:index:label"
            parts = [str(entry, "utf-8").split(":", 2) for entry in row]
            best = [(label, float(score)) for score, _, label in parts]
        else:
            best = best_labels(row, read_labels(models / "magika" / "labels.txt"))
        return "\n".join(f"{score:8.4%}  {label}" for label, score in best)
    if model == "magika_features":
        row = outputs["bytes"][0]
        return (
            f"{row.size} numbers, {np.count_nonzero(row != 256)} of them bytes, beginning {bytes(row[:24].tolist())!r}"
        )
    if model == "silero_vad":
        probabilities = outputs["speech_probs"]
        spoken = [f"speech from {begin:.2f} s to {end:.2f} s" for begin, end in speech_segments(probabilities)]
        return "\n".join([timeline(probabilities), *(spoken or ["no speech"])])
    if model == "ocr_rec":
        text, confidence = read_text(outputs["fetch_name_0"][0], read_labels(models / "ocr_rec" / "labels.txt"))
        return f"{confidence:8.4%}  {text}"
    if model == "ocr":
        read = zip(outputs["TEXT"], outputs["CONFIDENCE"], strict=True)
        return "\n".join(f"{confidence:8.4%}  {str(text, 'utf-8')}" for text, confidence in read) or "no text"
    if model == "ocr_det":
        boxes = text_boxes(outputs["fetch_name_0"][0, 0])
        said = [f"text from ({left}, {top}) to ({right}, {bottom})" for left, top, right, bottom in boxes]
        return "\n".join(said) or "no text"
    return "\n".join(f"{name}: {value.tolist()}" for name, value in outputs.items())
