"""Shrink pictures to 8 x 8. The module ``inputs`` beside this file is the one that example clients use."""

import inputs
import numpy as np
import triton_python_backend_utils as pb_utils

SIDE = 8


def shrink(content):
    """FP32 [1, 8, 8] from 0 to 1 out of a PNG file: the means of 8 x 8 equal parts; ValueError for another file."""
    brightness = inputs.png_pixels(content, "IMAGE").mean(axis=2)
    height, width = brightness.shape
    if min(height, width) < SIDE:
        raise ValueError(f"IMAGE is {width} x {height}, it must be at least {SIDE} x {SIDE}")
    rows, columns = (np.arange(SIDE + 1) * side // SIDE for side in (height, width))
    sums = np.add.reduceat(np.add.reduceat(brightness, rows[:-1], axis=0), columns[:-1], axis=1)
    return (sums / np.outer(np.diff(rows), np.diff(columns)) / 255).astype(np.float32)[np.newaxis]


class TritonPythonModel:
    """IMAGE BYTES [n, 1] -> pixels FP32 [n, 1, 8, 8]."""

    def execute(self, requests):
        """Answer each request; what is no PNG file of the usual kind fails alone."""
        return [self._one(pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()) for request in requests]

    def _one(self, contents):
        try:
            rows = np.stack([shrink(content) for content in contents.reshape(-1)])
        except Exception as error:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"the picture cannot be read: {error}", pb_utils.TritonError.INVALID_ARG)
            )
        return pb_utils.InferenceResponse([pb_utils.Tensor("pixels", rows)])
