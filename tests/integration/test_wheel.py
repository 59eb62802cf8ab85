"""What a wheel of the project holds, built by pip as for a release. (Not with the house rules: it takes seconds.)"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("charonia", "gateway", "batcher", "executors", "protos")


def test_a_wheel_holds_exactly_the_five_packages(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build writes into its source tree
    for name in (*PACKAGES, "loadtest", "tests", "examples"):
        shutil.copytree(
            ROOT / name,
            source / name,
            ignore=shutil.ignore_patterns("__pycache__", "models", ".cache") if name == "examples" else None,
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    console = ("charonia/console/templates/parts/tiles.html", "charonia/console/static/vendored/uplot/LICENSE")
    for needed in ("charonia/eventlog/scripts/settle.lua", "charonia/py.typed", "protos/grpc_service.proto", *console):
        assert needed in names
    assert not [name for name in names if "test" in name.split("/")[0]]
