"""The example inputs: PNG and WAV readers, windows, shapes, and the request bodies for curl."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import types
import wave
from pathlib import Path

import expected
import inputs
import make_request
import numpy as np
import pytest
import read_answer
from PIL import Image


def test_committed_images_are_read_as_pillow_reads_them() -> None:
    for path in (inputs.LINE, inputs.PAGE):
        np.testing.assert_array_equal(inputs.read_png(path)[:, :, ::-1], np.asarray(Image.open(path).convert("RGB")))


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("noisy", [False, True])
def test_every_line_filter_is_undone(tmp_path: Path, mode: str, noisy: bool) -> None:
    y, x = np.mgrid[0:37, 0:53]
    pixels = np.stack([(3 * x + y) % 256, (x * y) % 256, (255 - 2 * y) % 256], axis=-1).astype(np.uint8)
    if noisy:
        pixels = np.random.default_rng(3).integers(0, 256, size=pixels.shape, dtype=np.uint8)
    image = Image.fromarray(pixels if mode == "RGB" else pixels[:, :, 0])
    image.save(tmp_path / "image.png")
    np.testing.assert_array_equal(inputs.read_png(tmp_path / "image.png")[:, :, ::-1], np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("step", [1, 3])
def test_one_line_filter_is_undone(kind: int, step: int) -> None:
    """Filter by the definition in the PNG specification, byte by byte, and come back."""
    rows = np.random.default_rng(kind).integers(0, 256, size=(5, 12)).astype(int)
    body = b""
    for y, row in enumerate(rows):
        above = rows[y - 1] if y else np.zeros(12, dtype=int)
        stored = []
        for x, value in enumerate(row):
            left, up, corner = (row[x - step], above[x], above[x - step]) if x >= step else (0, above[x], 0)
            estimate = left + up - corner
            distances = [
                (abs(estimate - left), 0, left),
                (abs(estimate - up), 1, up),
                (abs(estimate - corner), 2, corner),
            ]
            stored.append((value - [0, left, up, (left + up) // 2, min(distances)[2]][kind]) % 256)
        body += bytes([kind, *stored])
    np.testing.assert_array_equal(inputs._unfilter(body, 5, 12, step), rows.reshape(-1))


def test_other_images_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    Image.new("P", (4, 4)).save(path)
    with pytest.raises(ValueError, match="not an 8-bit grey or RGB PNG"):
        inputs.read_png(path)
    path.write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match="not a PNG file"):
        inputs.read_png(path)


def test_windows_carry_the_end_of_the_window_before() -> None:
    clip = np.arange(1, 1101, dtype=np.float32)
    windows = inputs.windows(clip)
    assert windows.shape == (3, 576)
    np.testing.assert_array_equal(windows[:, 64:].reshape(-1)[:1100], clip)
    np.testing.assert_array_equal(windows[0, :64], np.zeros(64))
    np.testing.assert_array_equal(windows[1:, :64], windows[:-1, -64:])
    assert not windows[2, 64 + 76 :].any()
    assert inputs.windows(clip[:512]).shape == (1, 576)


def test_other_clips_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "clip.wav"
    with wave.open(str(path), "wb") as clip:
        clip.setnchannels(1)
        clip.setsampwidth(2)
        clip.setframerate(8_000)
        clip.writeframes(bytes(64))
    with pytest.raises(ValueError, match="16 kHz"):
        inputs.samples(path)


@pytest.mark.parametrize(
    ("content", "first", "last"),
    [
        (b"", [256] * 1024, [256] * 1024),
        (b" \n", [256] * 1024, [256] * 1024),
        (b" ab \n", [97, 98, 32, 10] + [256] * 1020, [256] * 1021 + [32, 97, 98]),
        (b"x" * 1024, [120] * 1024, [120] * 1024),
        (b" " * 5000 + b"z" * 8, [256] * 1024, [32] * 1016 + [122] * 8),
        (b"a" * 2000 + b"\n" * 5000, [97] * 1024, [256] * 1024),
    ],
)
def test_file_features(content: bytes, first: list[int], last: list[int]) -> None:
    features = inputs.file_features(content)
    assert features.dtype == np.int32
    assert features[:1024].tolist() == first
    assert features[1024:].tolist() == last


def test_the_python_model_makes_the_same_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rule alone: the server's module is imported by the model and not used by the rule."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", types.ModuleType("triton_python_backend_utils"))
    path = inputs.INPUTS.parent / "python_models/magika_features/model.py"
    spec = importlib.util.spec_from_file_location("magika_features_model", path)
    assert spec is not None
    assert spec.loader is not None
    model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model)
    rng = np.random.default_rng(11)
    for size in (0, 1, 8, 1023, 1024, 1025, 2047, 4095, 4096, 4097, 9000):
        for content in (rng.bytes(size), b" \n" * (size // 3) + rng.bytes(size // 3) + b"\t" * (size // 3)):
            features = model.features(content)
            assert features.dtype == np.int32
            np.testing.assert_array_equal(features, inputs.file_features(content))


def test_lines_have_few_widths_and_keep_what_is_there() -> None:
    image = np.full((24, 90, 3), 200, dtype=np.uint8)
    tensor = inputs.line_tensor(image)
    assert tensor.shape == (3, 48, 320)
    np.testing.assert_allclose(tensor[:, :, :180], 200 / 127.5 - 1, atol=1e-6)
    assert not tensor[:, :, 180:].any()
    assert inputs.line_tensor(np.zeros((48, 321, 3), dtype=np.uint8)).shape == (3, 48, 384)


def test_resizing_by_two_keeps_a_ramp() -> None:
    ramp = np.broadcast_to(np.arange(0, 160, 8, dtype=np.uint8)[None, :, None], (6, 20, 3))
    doubled = inputs.resized(np.ascontiguousarray(ramp), 12, 40)
    assert doubled.shape == (12, 40, 3)
    assert doubled[5, :, 1].tolist() == [0, *range(2, 152, 4), 152]


def test_a_page_is_padded_to_multiples_of_32() -> None:
    assert inputs.page_tensor(np.zeros((33, 64, 3), dtype=np.uint8)).shape == (3, 64, 64)


# a PNG file is no text, which is all that JSON holds
@pytest.mark.parametrize(
    ("model", "binary"), [(m, b) for m in inputs.REQUESTS for b in (False, True) if b or m != "ocr"]
)
def test_a_request_body_carries_the_tensors(
    model: str, binary: bool, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert make_request.main([model, *(["--binary"] if binary else [])]) == 0
    captured = capsysbinary.readouterr()
    body = io.BytesIO(captured.out)
    head = json.loads(body.read(int(captured.err.split()[-1])) if binary else body.read())
    tensors = inputs.REQUESTS[model]()
    assert [one["name"] for one in head["inputs"]] == list(tensors)
    for one in head["inputs"]:
        array = tensors[one["name"]]
        assert one["shape"] == list(array.shape)
        if binary and one["datatype"] == "BYTES":
            size = int.from_bytes(body.read(4), "little")
            assert one["parameters"]["binary_data_size"] == size + 4
            assert body.read(size) == array.reshape(-1)[0]
        elif binary:
            np.testing.assert_array_equal(
                np.frombuffer(body.read(one["parameters"]["binary_data_size"]), array.dtype), array.reshape(-1)
            )
        elif one["datatype"] == "BYTES":
            assert one["data"][0].encode() == array.reshape(-1)[0]
        else:
            np.testing.assert_array_equal(np.array(one["data"], array.dtype), array.reshape(-1))
    assert body.read() == b""


def test_a_file_that_is_not_text_needs_the_binary_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_request.main(["magika_features", "--file", str(inputs.VOICE)]) == 1
    assert capsys.readouterr().err.startswith("make_request: ")


def test_answers_come_back_as_arrays() -> None:
    answer = {
        "outputs": [
            {"name": "p", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 1]},
            {"name": "s", "datatype": "BYTES", "shape": [1, 1], "data": ["0.9:1:a:b"]},
        ]
    }
    arrays = read_answer.arrays(json.dumps(answer, ensure_ascii=False).encode())
    assert arrays["p"].tolist() == [[0.5, 1.0]]
    assert arrays["s"].tolist() == [[b"0.9:1:a:b"]]
    with pytest.raises(ValueError, match="no such model"):
        read_answer.arrays(b'{"error": "no such model"}')


def test_binary_answers_come_back_as_arrays() -> None:
    described = [("p", "FP32", 8), ("s", "BYTES", 10)]
    outputs = [
        {"name": name, "datatype": datatype, "shape": [2], "parameters": {"binary_data_size": size}}
        for name, datatype, size in described
    ]
    data = np.array([0.5, 1], np.float32).tobytes() + (2).to_bytes(4, "little") + "ü".encode() + bytes(4)
    arrays = read_answer.arrays(json.dumps({"id": "ü", "outputs": outputs}, ensure_ascii=False).encode() + data)
    assert arrays["p"].tolist() == [0.5, 1.0]
    assert arrays["s"].tolist() == ["ü".encode(), b""]


def test_expectations_cover_every_request() -> None:
    assert expected.OUTPUTS.keys() == inputs.REQUESTS.keys() == expected._CHECKS.keys()
    assert all((inputs.INPUTS / name).is_file() for name in expected.FILE_TYPES)
