"""Adds up the metrics pages of several parts, series by series. Text in, text out; no metrics library is needed. Pure.

Parts export only what they did, so a counter of two executors is their sum, and so is a gauge of what each holds.
Histogram buckets add up like counters; quantiles of summaries are made anew (`latencies`).
"""

from __future__ import annotations

from math import inf

from charonia.latencies import joint_quantiles


def merge(pages: list[str], *, last: bool = True) -> bytes:
    """Join text expositions (0.0.4): families keep their first HELP and TYPE, equal series are added.

    Unless it is the `last` join, the result is such a part again.
    """
    heads: dict[str, list[str]] = {}
    series: dict[str, dict[str, float]] = {}
    for page in pages:
        family = ""
        for line in page.split("\n"):  # and nowhere else: a label value may hold any other line separator
            if line.startswith(("# HELP ", "# TYPE ")):
                _, word, family, *_ = line.split(" ", 3)
                known = heads.setdefault(family, [])
                if not any(head.split(" ", 2)[1] == word for head in known):
                    known.append(line)
                series.setdefault(family, {})
            elif line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                try:
                    amount = float(value)
                except ValueError:
                    continue  # one part's bad line must not cost the page
                values = series.setdefault(family, {})
                values[name] = values.get(name, 0.0) + amount
    lines: list[str] = []
    for family, values in series.items():
        head = heads.get(family, [])
        lines += head
        if last and f"# TYPE {family} summary" in head:
            values = joint_quantiles(family, values)
        lines += [f"{name} {_number(value)}" for name, value in values.items()]
    return ("\n".join(lines) + "\n").encode()


def _number(value: float) -> str:
    if value != value or value in (inf, -inf):
        return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
