"""Decode a page. The module ``inputs`` beside this file is the one that example clients use."""

import inputs
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """IMAGE BYTES [1], a PNG file -> PAGE FP32 [1, 3, height, width], PIXELS UINT8 [height, width, 3], blue first."""

    def execute(self, requests):
        """Answer each request; what is no PNG file of the usual kind fails alone."""
        return [self._one(request) for request in requests]

    def _one(self, request):
        content = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()[0]
        try:
            pixels = inputs.png_pixels(content, "IMAGE")
        except Exception as error:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"the page cannot be read: {error}", pb_utils.TritonError.INVALID_ARG)
            )
        page = inputs.page_tensor(pixels)[np.newaxis]
        return pb_utils.InferenceResponse([pb_utils.Tensor("PAGE", page), pb_utils.Tensor("PIXELS", pixels)])
