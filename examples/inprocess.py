"""Ask models in this program's own process: Triton's in-process Python API, without ports and without a client.

``python examples/inprocess.py`` loads three of the example models and tells the type of a file, this one by default.
Written for `tritonserver`, it needs no change but the import.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import numpy

import charonia.inprocess as tritonserver

MODELS = Path(__file__).resolve().parent / "models"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", default=Path(__file__))
    parser.add_argument("--model-repository", type=Path, default=MODELS)
    given = parser.parse_args()

    server = tritonserver.Server(
        model_repository=str(given.model_repository),
        model_control_mode=tritonserver.ModelControlMode.EXPLICIT,
        startup_models=["magika", "magika_features"],
    )
    server.start(wait_until_ready=True)

    # A response for each request; several from a decoupled model.
    content = tritonserver.Tensor.from_bytes_array([[given.file.read_bytes()]])
    for response in server.model("magika_features").infer(inputs={"CONTENT": content}):
        features = numpy.from_dlpack(response.outputs["bytes"])

    labels = (given.model_repository / "magika" / "labels.txt").read_text().splitlines()
    for response in server.model("magika").infer(inputs={"bytes": features}):
        scores = numpy.from_dlpack(response.outputs["target_label"])
        print(f"{given.file.name}: {labels[scores.argmax()]}")

    # Models come and go while the server runs.
    identity = server.load("identity")
    print(f"together: {asyncio.run(several(identity))}")
    server.unload(identity, wait_until_unloaded=True)
    print(f"identity: {server.models()['identity', 1].state}")

    try:
        server.model("no_such_model").infer()
    except tritonserver.NotFoundError as error:
        print(error)
    server.stop()


async def several(model: tritonserver.Model) -> list[float]:
    """Sixteen requests at once from an event loop of this program."""

    async def one(number: int) -> float:
        row = numpy.full((1, 16), number, numpy.float32)
        async for response in model.async_infer(inputs={"INPUT0": row}):
            answer = numpy.from_dlpack(response.outputs["OUTPUT0"])
        return float(answer[0, 0])

    return await asyncio.gather(*map(one, range(16)))


if __name__ == "__main__":
    main()
