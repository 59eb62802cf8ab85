"""Renders and checks the chart: `python -m helm_chart [--short] [--accept]`, from `tools`.

For each case of the matrix: Helm renders it, every manifest has the form of its kind, and the kept manifests are those
in `tests/house/rendered_chart`. Wrong values are refused, with words that help, each schema refuses a field that
there is not, KServe's a missing one that it requires, and that of Redis's operator a wrong value. Helm's commands of
the page about Kubernetes render, and what its other commands name is rendered (`shown_commands`). `--short` leaves out
the schemas that take long, those of operators and of older releases of Kubernetes.
`--accept` writes the kept manifests and the page of values.
Exit code 0 when all is well, 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import yaml

from helm_chart import redis_failover, rendering, schemas, shown_commands, values_page
from helm_chart.cases import CASES, REFUSED
from helm_chart.chart_files import PAGE, RENDERED, digest


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="helm_chart", description=__doc__)
    parser.add_argument("--accept", action="store_true", help="write the kept manifests and the page of values")
    parser.add_argument("--short", action="store_true", help="the quick schemas alone")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    if options.accept:
        PAGE.write_text(values_page.page())
    wrong = [*(fault for name in CASES for fault in _case(name, options.accept, options.short)), *_refusals()]
    wrong += shown_commands.faults(options.short)
    if PAGE.read_text() != values_page.page():
        wrong.append(f"{PAGE.name} is not of these values; write it with --accept")
    if options.accept and not wrong:
        (RENDERED / "digest").write_text(digest() + "\n")
    elif not options.accept and (RENDERED / "digest").read_text().strip() != digest():
        wrong.append("the kept manifests are not of this chart; look at them, then write them with --accept")
    for fault in wrong:
        print(fault, file=sys.stderr)
    print(f"{len(CASES)} cases, {len(REFUSED)} refusals, {len(wrong)} faults, {time.monotonic() - begun:.1f} s")
    return 1 if wrong else 0


def _case(name: str, accept: bool, short: bool) -> Iterator[str]:
    case = CASES[name]
    try:
        rendering.lint(case.values)
        text = rendering.render(case.values)
    except rendering.RefusedError as error:
        yield f"{name}: {error}"
        return
    manifests = [one for one in yaml.safe_load_all(text) if one]
    for manifest in manifests:
        for fault in schemas.faults(manifest, short):
            yield f"{name}: {manifest['kind']} {manifest['metadata']['name']}: {fault}"
    for kind, manifest in {one["kind"]: one for one in manifests if schemas.is_checked(one, short)}.items():
        place = "spec" if "spec" in manifest else "metadata"
        if not schemas.faults(manifest | {place: manifest[place] | {"noSuchField": 1}}, short):
            yield f"{name}: the schema of {kind} takes a field that there is not"
    for manifest in manifests:
        if manifest["apiVersion"].startswith("serving.kserve.io/"):
            less = {field: value for field, value in manifest["spec"].items() if field != "containers"}
            if not any("must not be" in fault for fault in schemas.faults(manifest | {"spec": less}, short)):
                yield f"{name}: the schema of {manifest['kind']} does not miss its containers"
        if manifest["apiVersion"] == redis_failover.API:
            spec, redis = manifest["spec"], manifest["spec"]["redis"]
            for wrong in ({"replicas": "3"}, {"resources": {"noSuchField": {}}}, {"storage": {"noSuchField": {}}}):
                if not schemas.faults(manifest | {"spec": spec | {"redis": redis | wrong}}, short):
                    yield f"{name}: the schema of {manifest['kind']} takes {wrong}"
    unchecked = sorted({one["kind"] for one in manifests if not schemas.is_checked(one, short)})
    print(f"{name}: {len(manifests)} manifests" + (f", without a schema: {', '.join(unchecked)}" if unchecked else ""))
    if not case.kept:
        return
    path = RENDERED / f"{name}.yaml"
    if accept:
        path.write_text(text)
    elif not path.exists() or path.read_text() != text:
        yield f"{name}: {path.name} differs; look at it, then write it with --accept"


def _refusals() -> Iterator[str]:
    for name, (values, words) in REFUSED.items():
        try:
            rendering.render(values)
        except rendering.RefusedError as error:
            if words not in str(error):
                yield f"{name}: refused with other words: {error}"
        else:
            yield f"{name}: was not refused"


if __name__ == "__main__":
    sys.exit(main())
