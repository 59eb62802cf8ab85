"""Regenerate the committed modules from the `.proto` files beside this one: `python -m protos.generate [--check]`.

Needs grpcio-tools at exactly `TOOLS_VERSION` (dependency group `protos`): it is the newest whose output loads under the
protobuf bound of the public client. `--check` writes nothing and exits 1 when a committed module differs.

Inside the descriptors the files keep their published names (`grpc_service.proto`, no folder), so that these modules and
the public client's describe the same file and load in one process; only the Python imports name this package.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from importlib import import_module, metadata, resources
from pathlib import Path

TOOLS_VERSION = "1.81.1"
HERE = Path(__file__).resolve().parent
SOURCES = ("model_config.proto", "grpc_service.proto")
SERVICES = ("grpc_service.proto",)


def generate() -> dict[str, str]:
    """File name to text of every generated module. Raises `RuntimeError` when the compiler is missing or refuses."""
    try:
        found = metadata.version("grpcio-tools")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != TOOLS_VERSION:
        raise RuntimeError(f"grpcio-tools {TOOLS_VERSION} is needed (dependency group 'protos'), found: {found}")
    protoc = import_module("grpc_tools.protoc")  # not at the top: only this function needs the compiler
    include = resources.files("grpc_tools") / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        common = ["protoc", f"-I{HERE}", f"-I{include}"]
        runs = (
            [*common, f"--python_out={folder}", f"--pyi_out={folder}", *SOURCES],
            [*common, f"--grpc_python_out={folder}", *SERVICES],
        )
        for run in runs:
            if protoc.main(run) != 0:
                raise RuntimeError(f"the protocol compiler refused {' '.join(run[1:])}")
        return {path.name: _in_package(path.read_text()) for path in sorted(Path(folder).iterdir())}


def _in_package(text: str) -> str:
    """Point imports, and the module name classes are given, at this package."""
    text = re.sub(r"^import (\w+_pb2) as ", r"from protos import \1 as ", text, flags=re.MULTILINE)
    return re.sub(r"(BuildTopDescriptorsAndMessages\(DESCRIPTOR, ')(\w+_pb2')", r"\1protos.\2", text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m protos.generate", description="regenerate the protobuf modules")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a committed module differs")
    options = parser.parse_args(arguments)
    try:
        texts = generate()
    except RuntimeError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    changed = [name for name, text in texts.items() if not _holds(HERE / name, text)]
    for name in changed:
        print(("differs: " if options.check else "written: ") + name)  # noqa: T201
        if not options.check:
            (HERE / name).write_text(texts[name])
    return 1 if options.check and changed else 0


def _holds(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
