"""Reads a metrics page (Prometheus text 0.0.4) into numbers by family and labels. Pure.

Pages are joined by `charonia.metrics.exposition`; what figures mean is `server_figures`' to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

Labels = tuple[tuple[str, str], ...]
"""Sorted pairs of label and value."""

Version = tuple[str, str]
"""(model, version) as the labels have them."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of the metrics. `time_s` is a clock's that never goes back; without metrics `families` is empty."""

    time_s: float
    families: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    _sums: dict[str, dict[str, dict[str, float]]] = field(init=False, repr=False, compare=False, default_factory=dict)
    """By family, model and version: with hundreds of models looking through all series for each would take a second."""

    def __post_init__(self) -> None:
        for family, series in self.families.items():
            sums = self._sums.setdefault(family, {})
            for labels, value in series.items():
                named = dict(labels)
                of_model = sums.setdefault(named.get("model", ""), {})
                version = named.get("version", "")
                of_model[version] = of_model.get(version, 0.0) + value

    def total(self, family: str) -> float:
        """The sum over all series of a family, 0 without any."""
        return sum(self.families.get(family, {}).values())

    def of_model(self, family: str, model: str, version: str = "") -> float:
        """The sum over the series of a model, or of one version."""
        sums = self._sums.get(family, {}).get(model, {})
        return sums.get(version, 0.0) if version else sum(sums.values())

    def series_of(self, family: str, model: str) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and value of each series of a model."""
        for labels, value in self.families.get(family, {}).items():
            named = dict(labels)
            if named.get("model") == model:
                yield named, value

    def versions(self) -> list[Version]:
        """Every model version that has statistics, by name."""
        sums = self._sums.get("nv_inference_request_success", {})
        return sorted((model, version) for model, versions in sums.items() if model for version in versions)


def read_page(text: str, time_s: float, wanted: Collection[str] = ()) -> Scrape:
    """The numbers of a page, of the families `wanted` or of all.

    What no parser understands is left out, so that one bad family costs no page.

    Counters have their names without `_total`, as Triton's families are called.
    """
    from prometheus_client.parser import text_string_to_metric_families

    families: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                if wanted and name not in wanted:
                    continue
                families.setdefault(name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    except ValueError:
        pass
    return Scrape(time_s, families)
