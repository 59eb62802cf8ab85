"""`python -m fuzzing`: feeds the targets one after the other; ends with 1 if something was found."""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

NAMES = ("http", "infer", "protobuf", "http2", "config", "wire", "frames", "jobs", "text")


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:  # before the targets are imported: atheris counts what is imported later
        return _worker(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument(
        "--target", action="append", choices=NAMES, help="one of the targets, may be repeated; else all"
    )
    parser.add_argument("--seconds", type=float, default=60, help="for each target (default 60)")
    parser.add_argument("--seed", type=int, help="of what is tried; printed, so that a run can be repeated")
    parser.add_argument("--engine", choices=("atheris", "mutation"), help="default: atheris where it is installed")
    parser.add_argument("--keep", type=int, default=0, metavar="N", help="keep up to N inputs that reached more")
    parser.add_argument("--input", type=Path, help="feed this file alone to the one target")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON; progress goes to stderr")
    options = parser.parse_args()

    from . import campaign

    targets = options.target or list(NAMES)
    if options.input is not None:
        if len(targets) != 1:
            parser.error("--input needs one --target")
        finding = campaign.replay(targets[0], [options.input.read_bytes()])
        print(finding.report if finding else "nothing found")
        return int(finding is not None)
    if options.engine == "atheris" and not campaign.can_guide():
        parser.error("atheris is not installed")
    engine = options.engine or ("atheris" if campaign.can_guide() else "mutation")
    seed = options.seed if options.seed is not None else random.randrange(1, 2**31)
    outcomes, failed = [], False
    for target in targets:
        outcome, finding = campaign.run(
            target, seed=seed, seconds=options.seconds, engine=engine, keeps_more=options.keep, say=_say
        )
        outcomes.append(outcome)
        if finding is not None:
            failed = True
            _say(f"{target}: {finding.kind}, kept as {outcome.kept[0]}\n{finding.report}")
        if not options.json:
            grew = f", {outcome.added} kept" if outcome.added else ""
            edges = f", {outcome.coverage} edges" if outcome.coverage else ""
            print(
                f"{target}: {'FOUND' if finding else 'ok'}, {outcome.inputs} inputs in {outcome.seconds} s by "
                f"{engine}{edges}, corpus {outcome.corpus}{grew}, --seed {seed}",
                flush=True,
            )
    if options.json:
        print(json.dumps([outcome.json() for outcome in outcomes], indent=2))
    return int(failed)


def _worker(target: str, arguments: list[str]) -> int:
    import atheris

    packages = ["charonia", "gateway", "executors", "uvicorn", "hpack"]
    with atheris.instrument_imports(include=packages):
        from . import targets
    atheris.Setup([sys.argv[0], *arguments], targets.checked(target, with_alarm=False))
    atheris.Fuzz()
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
