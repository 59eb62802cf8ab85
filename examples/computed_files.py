"""Files that a build script computes (a conversion, a training), kept in ``examples/.cache`` by what they came from.

Such files have no SHA-256 that could be written down: another version of a library makes other bytes of them. So their
name in the cache is a digest of the script, the libraries' versions and the wheels; they are computed once for each.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from build_models import CACHE, Artifact, alone, scratch


def computed(
    name: str, sources: Iterable[bytes | str], compute: Callable[[], dict[str, bytes]], cache: Path = CACHE
) -> dict[str, Artifact]:
    """The files that `compute` returns by name, as files of a repository.

    `sources` are what the result depends on, in order. Two builds at once compute it once.
    """
    digest = hashlib.sha256()
    for source in sources:
        content = source.encode() if isinstance(source, str) else source
        digest.update(len(content).to_bytes(8, "big") + content)
    kept = cache / f"{name}-{digest.hexdigest()[:32]}"
    with alone(cache):
        if not kept.is_dir():
            with scratch(cache / f"{name}-new") as folder:
                for file, content in compute().items():
                    (folder / file).write_bytes(content)
                os.replace(folder, kept)
    return {path.name: _artifact(path.read_bytes()) for path in sorted(kept.iterdir())}


def _artifact(content: bytes) -> Artifact:
    return Artifact(hashlib.sha256(content).hexdigest(), lambda _: content)
