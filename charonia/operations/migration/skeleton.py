"""Writes the `model.py` of a migrated model whose work was code: it loads nothing until it is filled in."""

from __future__ import annotations

from .migrated_model import MigratedModel

_TEXT = '''"""The model {name}, made by `charonia migrate` from {source}.

To be filled in:
{steps}
Until then it does not load. docs/howto/python-models.md says what a model can use.
"""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        """Runs once for each instance. `args["model_repository"]` is the model's directory."""
        raise NotImplementedError("fill in initialize and execute of {file}")

    def execute(self, requests):
        """Returns one response for each request."""
        responses = []
        for request in requests:
{inputs}
            raise NotImplementedError("fill in execute of {file}")
            responses.append(
                pb_utils.InferenceResponse(
                    output_tensors=[
{outputs}
                    ]
                )
            )
        return responses
'''


def skeleton(model: MigratedModel) -> str:
    """The code. Tensors are numbered variables, so that no name of the source becomes code."""
    inputs = [
        f"            input_{n} = pb_utils.get_input_tensor_by_name(request, {tensor.name!r}).as_numpy()"
        for n, tensor in enumerate(model.inputs)
    ]
    outputs = [
        f"                        pb_utils.Tensor({tensor.name!r}, np.asarray(output_{n})),"
        for n, tensor in enumerate(model.outputs)
    ]
    steps = model.steps or ["what the model does"]
    return _TEXT.format(
        name=model.name,
        source=_line(model.source),
        file=f"{model.name}/{model.version}/model.py",
        steps="\n".join(f"- {_line(step)}" for step in steps),
        inputs="\n".join(inputs) or "            # the configuration has no inputs yet",
        outputs="\n".join(outputs) or "                        # the configuration has no outputs yet",
    )


def _line(text: str) -> str:
    """Text of the source within a docstring: one line that cannot end it."""
    shown = "".join(sign if sign.isprintable() else "?" for sign in " ".join(text.split()))
    return shown.replace("\\", "/").replace('"', "'")
