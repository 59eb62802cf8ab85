"""Cut the lines of text out of a page. The modules beside this file are those that example clients use."""

import decode
import inputs
import numpy as np
import triton_python_backend_utils as pb_utils

MOST_LINES = 8
"""The max_batch_size of ``ocr_rec``."""


class TritonPythonModel:
    """PIXELS UINT8 [height, width, 3] and PROBABILITIES FP32 [1, 1, height, width] of the page, padded or not.

    LINES FP32 [lines, 3, 48, width], the shorter ones padded; BOXES INT32 [lines, 4]; ANY BOOL [1].
    """

    def execute(self, requests):
        """Answer each request."""
        return [self._one(request) for request in requests]

    def _one(self, request):
        pixels = pb_utils.get_input_tensor_by_name(request, "PIXELS").as_numpy()
        found = pb_utils.get_input_tensor_by_name(request, "PROBABILITIES").as_numpy()
        height, width = pixels.shape[:2]
        boxes = decode.text_boxes(found[0, 0, :height, :width])
        if len(boxes) > MOST_LINES:
            text = f"the page has {len(boxes)} lines of text, at most {MOST_LINES} are read"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG))
        lines = [inputs.line_tensor(pixels[top:bottom, left:right]) for left, top, right, bottom in boxes]
        widest = max((line.shape[2] for line in lines), default=320)
        padded = [np.pad(line, ((0, 0), (0, 0), (0, widest - line.shape[2]))) for line in lines]
        stacked = np.stack(padded) if padded else np.zeros((0, 3, 48, widest), np.float32)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("LINES", stacked),
                pb_utils.Tensor("BOXES", np.array(boxes, np.int32).reshape(-1, 4)),
                pb_utils.Tensor("ANY", np.array([bool(boxes)])),
            ]
        )
