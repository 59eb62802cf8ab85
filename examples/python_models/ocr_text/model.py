"""Read the scores of lines of text. The module ``decode`` beside this file is the one that example clients use."""

from pathlib import Path

import decode
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """BOXES INT32 [lines, 4], SCORES FP32 [lines, steps, 18710] or nothing -> TEXT BYTES [lines], CONFIDENCE FP32."""

    def initialize(self, args):
        """Read which score is which character."""
        self.labels = decode.read_labels(Path(__file__).with_name("labels.txt"))

    def execute(self, requests):
        """Answer each request."""
        return [self._one(request) for request in requests]

    def _one(self, request):
        scores = pb_utils.get_input_tensor_by_name(request, "SCORES")
        read = [decode.read_text(line, self.labels) for line in scores.as_numpy()] if scores is not None else []
        text = np.array([text.encode() for text, _ in read], dtype=np.object_)
        confidence = np.array([confidence for _, confidence in read], dtype=np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", text), pb_utils.Tensor("CONFIDENCE", confidence)])
