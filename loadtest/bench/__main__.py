"""`python -m loadtest.bench`: h2load on one or several servers in turn, point by point, over gRPC and HTTP.

Serve this checkout and print what a request costs:

    python -m loadtest.bench --models identity,mlp --in-flight 1,8,64,256

Compare it with another revision and with Triton (`make peers-setup PEERS=dir PEER=triton` sets that up), interleaved:

    python -m loadtest.bench --base 73a13c3 --peers dir --peer triton --models identity --rounds 5 --duration 1

Load a server that already runs, as with a profiler attached (it must serve the models; `--repository` keeps them):

    python -m loadtest.bench --no-own --repository /tmp/models --models identity --state-dir /tmp/state

`--base` takes a revision (checked out into a temporary git worktree) or a directory that holds a checkout. `--checkout`
serves another directory than the one of this module. `--no-own` leaves this checkout out. The ratios at the end are
medians over rounds of figure / figure of the base, or of the first peer without one. h2load is in Debian's package
nghttp2-client. Every answer's content is checked against onnxruntime or the input before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest.model import LoadTestError
from loadtest.peers.recipes import RECIPES, running

from . import h2load
from .cases import find, write_repository
from .points import Calls, Results, Server, charonia_server, count_calls, favour, run_rounds
from .report import print_report
from .servers import Charonia, endpoints_of

ROOT = Path(__file__).resolve().parents[2]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="all", metavar="A,B,…", help="cases (default all)")
    parser.add_argument("--protocols", default="grpc,http", metavar="A,B")
    parser.add_argument("--in-flight", default="1,8,64,256", metavar="N,N,…")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=1.0, metavar="S", help="seconds per point (default 1)")
    parser.add_argument("--checkout", type=Path, default=ROOT, metavar="DIR", help="source tree to serve")
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="load the `charonia serve` with this state as well"
    )
    parser.add_argument("--no-own", action="store_true", help="serve only --base and --peer")
    parser.add_argument("--base", metavar="REV|DIR", help="another revision or checkout, measured in turn")
    parser.add_argument("--base-python", default=sys.executable, metavar="FILE", help="interpreter of --base")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where `make peers-setup` put the peers")
    parser.add_argument("--peer", action="append", default=[], choices=sorted(RECIPES), help="may be repeated")
    parser.add_argument("--no-calls", action="store_true", help="do not count Python calls afterwards")
    parser.add_argument("--serve-option", action="append", default=[], metavar="OPTION", help="for charonia serve")
    parser.add_argument("--examples", type=Path, default=ROOT / "examples" / "models", metavar="DIR")
    parser.add_argument("--repository", type=Path, metavar="DIR", help="keep the generated models there")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append every point to it, one JSON line each")
    return parser


def levels_of(text: str) -> list[int]:
    """The numbers of `--in-flight`. Raises LoadTestError."""
    try:
        levels = [int(word) for word in text.split(",")]
    except ValueError:
        levels = [0]
    if min(levels) < 1:
        raise LoadTestError(f"--in-flight must be N,N,… of at least 1, got {text!r}")
    return levels


@contextmanager
def checkout_of(revision: str) -> Iterator[Path]:
    """The directory itself, or a temporary git worktree of a revision. Raises LoadTestError for an unknown one."""
    if Path(revision).is_dir():
        yield Path(revision).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="charonia-base-") as home:
        tree = Path(home) / "tree"
        command = ["git", "-C", str(ROOT), "worktree"]
        made = subprocess.run([*command, "add", "--detach", str(tree), revision], capture_output=True, text=True)
        if made.returncode:
            raise LoadTestError(f"git worktree add {revision}: {made.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run([*command, "remove", "--force", str(tree)], capture_output=True, check=False)


@contextmanager
def repository_of(options: argparse.Namespace) -> Iterator[Path]:
    """The model repository with all cases asked for, a temporary one unless `--repository` names it."""
    with ExitStack() as stack:
        path = options.repository or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loadtest-models-")))
        write_repository(path, find(options.models), options.examples)
        yield path


def trees_of(stack: ExitStack, options: argparse.Namespace) -> dict[str, Path]:
    """The source trees to serve, by the name of their server."""
    trees = {} if options.no_own else {"own": options.checkout.resolve()}
    if options.base:
        trees["base"] = stack.enter_context(checkout_of(options.base))
    return trees


@contextmanager
def servers_of(options: argparse.Namespace, trees: dict[str, Path], repository: Path) -> Iterator[list[Server]]:
    """Every server of the run, while they run. Raises LoadTestError when one does not start."""
    if options.peer and options.peers is None:
        raise LoadTestError("--peer needs --peers DIR")
    if not (trees or options.peer or options.state_dir):
        raise LoadTestError("nothing to measure: --no-own without --base, --peer or --state-dir")
    with ExitStack() as stack:
        servers = []
        for name, tree in trees.items():
            python = options.base_python if name == "base" else sys.executable
            server = stack.enter_context(Charonia(repository, options.serve_option, tree, python=python))
            servers.append(charonia_server(name, server.endpoints))
        if options.state_dir:
            servers.append(charonia_server("running", endpoints_of(options.state_dir)))
        for name in options.peer:
            peer = running(name, options.peers.resolve(), find(options.models), repository)
            servers.append(stack.enter_context(peer))
        yield servers


def run(options: argparse.Namespace) -> tuple[Results, Calls]:
    """All rounds, then the counts of calls. Raises LoadTestError."""
    h2load.require()
    cases, levels, protocols = find(options.models), levels_of(options.in_flight), options.protocols.split(",")
    if options.rounds < 1 or options.duration <= 0 or not set(protocols) <= {"grpc", "http"}:
        raise LoadTestError("--rounds and --duration must be positive, --protocols of grpc and http")
    favour()
    calls: Calls = {}
    with ExitStack() as stack:
        repository = stack.enter_context(repository_of(options))
        out = stack.enter_context(options.out.open("a")) if options.out else None

        def record(document: dict[str, Any]) -> None:
            if out is not None:
                print(json.dumps(document), file=out, flush=True)

        trees = trees_of(stack, options)
        with servers_of(options, trees, repository) as servers:
            rounds = (options.rounds, options.duration)
            results = run_rounds(servers, cases, protocols, levels, repository, *rounds, record)
        for name, tree in {}.items() if options.no_calls else trees.items():
            calls |= count_calls(name, tree, options.serve_option, repository, cases, protocols, levels)
        for (key, name), by_role in calls.items():
            record({**asdict(key), "server": name, "calls": by_role})
    return results, calls


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 when the bench could not run."""
    options = parser().parse_args(arguments)
    try:
        results, calls = run(options)
    except (LoadTestError, OSError, ValueError, KeyError) as error:
        print(f"loadtest.bench: {error}", file=sys.stderr)
        return 2
    print_report(results, calls, "base" if options.base else next(iter(options.peer), None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
