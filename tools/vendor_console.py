"""Copies the console's style sheet and plotting library out of their npm packages, with their licences and versions.

    python tools/vendor_console.py

It fetches the packages of `PACKAGES` with npm (`npm pack`), checks their content against `integrity` and replaces
`charonia/console/static/vendored`. Users need neither npm nor this script: its result is part of the repository.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "charonia" / "console" / "static" / "vendored"


@dataclass(frozen=True)
class Package:
    """An npm package of a fixed version: `integrity` is the registry's digest of its archive, `files` what is taken."""

    name: str
    version: str
    integrity: str
    licence: str
    files: tuple[str, ...]


PACKAGES = (
    Package(
        "@picocss/pico",
        "2.1.1",
        "sha512-kIDugA7Ps4U+2BHxiNHmvgPIQDWPDU4IeU6TNRdvXQM1uZX+FibqDQT2xUOnnO2yq/LUHcwnGlu1hvf4KfXnMg==",
        "LICENSE.md",
        ("css/pico.min.css",),
    ),
    Package(
        "uplot",
        "1.6.32",
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        "LICENSE",
        ("dist/uPlot.iife.min.js", "dist/uPlot.min.css"),
    ),
)


def main() -> int:
    """Exit status 1 if an archive is not the expected one."""
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / "vendored"
        made.mkdir()
        for package in PACKAGES:
            if not _take(package, Path(directory), made):
                return 1
        shutil.rmtree(TARGET, ignore_errors=True)
        shutil.copytree(made, TARGET)
    print(f"{TARGET}: {', '.join(f'{p.name} {p.version}' for p in PACKAGES)}")
    return 0


def _take(package: Package, directory: Path, made: Path) -> bool:
    named = f"{package.name}@{package.version}"
    packed = subprocess.run(
        ["npm", "pack", "--silent", named], cwd=directory, check=True, capture_output=True, text=True
    )
    archive = directory / packed.stdout.split()[-1]
    digest = f"sha512-{base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()}"
    if digest != package.integrity:
        print(f"{named} has the digest {digest}, not {package.integrity}", file=sys.stderr)
        return False
    folder = made / package.name.rpartition("/")[2]
    folder.mkdir()
    with tarfile.open(archive) as tar:
        for name in (*package.files, package.licence):
            content = tar.extractfile(f"package/{name}")
            assert content is not None, f"{named} has no {name}"
            (folder / ("LICENSE" if name == package.licence else Path(name).name)).write_bytes(content.read())
    (folder / "VERSION").write_text(f"{package.name} {package.version}\n{digest}\n")
    return True


if __name__ == "__main__":
    sys.exit(main())
