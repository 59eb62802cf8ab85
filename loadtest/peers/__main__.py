"""`python -m loadtest.peers setup --peers DIR [--peer NAME …]`: sets peers up in a directory outside the repository."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from .recipes import RECIPES, set_up


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.peers", description=__doc__)
    parser.add_argument("action", choices=["setup"])
    parser.add_argument("--peer", action="append", choices=sorted(RECIPES), help="may be repeated (default: all)")
    parser.add_argument("--peers", type=Path, required=True, metavar="DIR", help="outside the repository, about 4 GiB")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 1 when one of the peers could not be set up."""
    options = parser().parse_args(arguments)
    failed = []
    for name in options.peer or RECIPES:
        print(f"setting {name} up in {options.peers / name}", flush=True)
        try:
            set_up(name, options.peers.resolve())
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
