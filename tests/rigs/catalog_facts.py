"""Facts of executors about one model, and the catalog that they make."""

from __future__ import annotations

from charonia.catalog.catalog import Catalog
from charonia.facts.events import Fact, ProcessJoined, ProcessLeft, RepositoryScanned, VersionLoaded
from charonia.models.config_forms import parse
from executors.configuration.config import normalise

CONFIG = normalise(
    parse(
        'name: "m" backend: "python" input { name: "x" data_type: TYPE_FP32 dims: 1 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    )
).SerializeToString()


def joined(name: str = "e") -> ProcessJoined:
    return ProcessJoined("executor", name)


def scanned(name: str = "e", *models: str, ready: bool = True) -> RepositoryScanned:
    return RepositoryScanned(name, models or ("m",), "explicit", ready)


def loaded(name: str = "e", version: int = 1, content_hash: str = "h1", slots: int = 2) -> VersionLoaded:
    return VersionLoaded(name, "m", version, content_hash, slots, CONFIG, {"y": ["cat"]})


def left(name: str = "e", reason: str = "lost") -> ProcessLeft:
    return ProcessLeft("executor", name, reason)


def catalog(*facts: Fact) -> Catalog:
    """The fold; every fact is applied twice, which must change nothing."""
    found = Catalog()
    for fact in facts:
        found.apply(fact)
        found.apply(fact)
    return found
