"""Makes and removes the temporary model directory of a load request with files (R25)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from charonia.errors import InternalError, InvalidArgument
from charonia.eventlog.port import Blobs
from executors.host import owned_folders

from .files import contained


async def fetch(log: Blobs, model: str, files: Mapping[str, str]) -> dict[str, bytes]:
    """Fetch the files' contents, by path. Raises `InternalError` for one that the log no longer holds."""
    contents: dict[str, bytes] = {}
    for path, blob_id in files.items():
        data = await log.blob(blob_id)
        if data is None:
            raise InternalError(f"file '{path}' of the load request for '{model}' is not in the log any more")
        contents[path] = data
    return contents


def write(model: str, contents: Mapping[str, bytes]) -> Path:
    """Make a new directory with only these files, `<version>/<path>`.

    Raises `InvalidArgument` for a path that leads out of it, `OSError` or `ValueError` when it cannot be written.
    """
    directory = owned_folders.make() / "model"
    try:
        directory.mkdir()
        for relative, data in contents.items():
            path = contained(directory, relative)
            if path is None or "\0" in relative:
                raise InvalidArgument(
                    f"file path '{relative}' of the load request for '{model}' is outside the model directory"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    except BaseException:
        remove(directory)
        raise
    return directory


def remove(directory: Path) -> None:
    """Remove a directory made by `write`."""
    owned_folders.remove(directory.parent)
