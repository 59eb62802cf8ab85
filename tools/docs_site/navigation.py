"""Where each page of the repository stands in the site: by what a reader wants to do.

`tests/house/test_docs_site.py` checks that every page is named here exactly once.
"""

from __future__ import annotations

FRONT = "README.md"

HOWTO = "docs/howto/"

SECTIONS: dict[str, tuple[str, ...]] = {
    "Ask a server": (
        f"{HOWTO}python-client.md",
        "docs/jobs.md",
        "docs/streaming.md",
        "docs/webhooks.md",
        f"{HOWTO}openai.md",
        f"{HOWTO}openai-stored.md",
        f"{HOWTO}shared-memory.md",
        f"{HOWTO}inprocess.md",
        f"{HOWTO}bind.md",
        "examples/README.md",
    ),
    "Serve a model": (
        f"{HOWTO}model-settings.md",
        f"{HOWTO}onnxruntime.md",
        f"{HOWTO}pytorch.md",
        f"{HOWTO}openvino.md",
        f"{HOWTO}tensorflow.md",
        f"{HOWTO}tensorrt.md",
        f"{HOWTO}jax.md",
        f"{HOWTO}fil.md",
        f"{HOWTO}sklearn.md",
        f"{HOWTO}catboost.md",
        f"{HOWTO}mlflow.md",
        f"{HOWTO}dali.md",
        f"{HOWTO}spacy.md",
        f"{HOWTO}python-models.md",
        f"{HOWTO}llm.md",
        f"{HOWTO}vllm.md",
        f"{HOWTO}tensorrt-llm.md",
        f"{HOWTO}several-frameworks.md",
        f"{HOWTO}check.md",
        f"{HOWTO}migrate.md",
        f"{HOWTO}remote-repositories.md",
        f"{HOWTO}namespaces.md",
    ),
    "Schedule and batch": (
        f"{HOWTO}adaptive-batching.md",
        f"{HOWTO}custom-batching.md",
        f"{HOWTO}ragged-batching.md",
        f"{HOWTO}sequences.md",
        f"{HOWTO}ensembles.md",
        f"{HOWTO}business-logic.md",
        f"{HOWTO}decoupled-models.md",
        f"{HOWTO}cache-responses.md",
        f"{HOWTO}rate-limiter.md",
        f"{HOWTO}scheduler.md",
    ),
    "Operate": (
        "docs/operating.md",
        "docs/stack.md",
        "docs/metrics.md",
        "docs/boards.md",
        f"{HOWTO}console.md",
        f"{HOWTO}tracing.md",
        "docs/queue-tools.md",
        "docs/model-faults.md",
        "docs/durability.md",
        "docs/tenants.md",
        f"{HOWTO}usage.md",
        f"{HOWTO}journal.md",
        f"{HOWTO}isolation.md",
        f"{HOWTO}many-models.md",
        f"{HOWTO}pools.md",
        f"{HOWTO}clouds.md",
        f"{HOWTO}kubernetes.md",
        f"{HOWTO}kubernetes-values.md",
        f"{HOWTO}upgrades.md",
        f"{HOWTO}release.md",
    ),
    "Measure": (
        f"{HOWTO}bench.md",
        f"{HOWTO}tune.md",
        f"{HOWTO}simulate.md",
        "docs/performance.md",
        "docs/benchmarks.md",
        "docs/hostile-inputs.md",
    ),
    "Understand and change": (
        "docs/architecture.md",
        "docs/glossary.md",
        f"{HOWTO}write-a-backend.md",
        "CONTRIBUTING.md",
        "docs/style.md",
        "CHANGELOG.md",
    ),
    "Reference": ("docs/compatibility.md", "docs/interface.md"),
}
"""Pages by section, in the order of the navigation. The generated references join the last one, the records of
decisions the one about understanding."""

GENERATED = ("reference/http/index.md", "reference/options.md", "reference/client.md")
"""Pages of the section `Reference` that are made by each build."""

RECORDS = "docs/adr"


def pages() -> list[str]:
    """Every page of the repository that the navigation names, the front page and the records left out."""
    return [page for names in SECTIONS.values() for page in names]
