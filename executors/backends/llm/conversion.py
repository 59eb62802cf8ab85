"""Converts GGUF files to OpenVINO's IR, once: what was made stays in a directory of conversions.

A conversion is a directory as `optimum-cli export openvino` writes it. Its name comes from the file's name, size, time
of change and first and last bytes: a file that is replaced is converted again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import metadata as distributions
from pathlib import Path

from charonia.errors import InternalError, Unsupported

from .gguf_metadata import read_metadata
from .gguf_tokenizer import hugging_face_files

CONVERSIONS = "charonia.conversions"
IR = "openvino_model.xml"
_LIMIT_S = 3600.0
_SAMPLED_BYTES = 1 << 20
_FORM = 2
"""To be raised when conversions of before are wrong."""


def default_directory() -> Path:
    """Where conversions are without a setting: in the user's directory of caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "charonia" / "llm"


def converted(gguf: Path, directory: Path) -> Path:
    """The conversion of a file, made now unless it is there. Blocks, for seconds to minutes.

    Raises `InvalidArgument` for a file that is no GGUF, `Unsupported` for a tokenizer that is not known or without the
    converter, `InternalError` when the conversion fails or there is no place for it.
    """
    made = directory / _name(gguf)
    if (made / IR).is_file():
        return made
    files = hugging_face_files(read_metadata(gguf))
    files |= {path.name: path.read_bytes() for name in files if (path := gguf.parent / name).is_file()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{made.name}-", dir=directory))
    except OSError as error:
        raise InternalError(
            f"'{gguf.name}' cannot be converted: no place in '{directory}' ({error.strerror}); name another directory "
            f"with '{CONVERSIONS}'"
        ) from None
    try:
        _convert(gguf, place)
        for name, content in files.items():
            (place / name).write_bytes(content)
        with contextlib.suppress(OSError):  # another process was faster
            place.rename(made)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return made


def _convert(gguf: Path, place: Path) -> None:
    link = place / "model.gguf"
    source = gguf.resolve()
    if os.access(source, os.W_OK):
        link.symlink_to(source)
    else:  # the library opens for writing what it only reads
        try:
            shutil.copyfile(source, link)
        except OSError as error:
            raise InternalError(
                f"'{gguf.name}' cannot be converted: it cannot be copied to '{place.parent}' ({error.strerror}); name "
                f"another directory with '{CONVERSIONS}'"
            ) from None
    _say(f"converting '{gguf}' ({gguf.stat().st_size >> 20} MB) to OpenVINO's IR: once, for seconds to minutes")
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "executors.backends.llm.conversion_process", os.fspath(link)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except OSError as error:
        raise Unsupported(f"'{gguf.name}' cannot be converted: no process can be started here ({error})") from None
    except subprocess.TimeoutExpired:
        raise InternalError(f"'{gguf.name}' cannot be converted: it took longer than {_LIMIT_S:.0f} s") from None
    link.unlink()
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode and lines and "openvino_genai" in lines[-1]:
        raise Unsupported(
            f"'{gguf.name}' has to be converted, and the converter is not installed: install charonia[llm-gguf], or "
            f"give the model as OpenVINO's IR ({lines[-1]})"
        )
    if done.returncode or not (place / IR).is_file():
        raise InternalError(f"'{gguf.name}' cannot be converted: {' '.join(lines[-1:]) or done.returncode}")
    _say(f"converted '{gguf}' in {time.monotonic() - began:.0f} s")


def _say(line: str) -> None:
    """To the executor, which writes what its models write."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _name(gguf: Path) -> str:
    status = gguf.stat()
    digest = hashlib.blake2b(digest_size=12)
    # another converter may make another graph
    digest.update(f"{status.st_size} {status.st_mtime_ns} {_converter()} {_FORM}".encode())
    with gguf.open("rb") as file:
        digest.update(file.read(_SAMPLED_BYTES))
        file.seek(max(0, status.st_size - _SAMPLED_BYTES))
        digest.update(file.read())
    return f"{gguf.stem}-{digest.hexdigest()}"


def _converter() -> str:
    try:
        return distributions.version("openvino-genai")
    except distributions.PackageNotFoundError:
        return ""
