"""Turn the content of a file into the input of the model ``magika``.

The rule: take the first and the last 4,096 bytes (a shorter file is both). Drop white space from the front of the first
block and from the back of the last. What is left of the first block gives its first 1,024 bytes, padded behind; what is
left of the last gives its last 1,024, padded in front. Together they are the 2,048 numbers; 256, no byte, pads.
"""

import numpy as np
import triton_python_backend_utils as pb_utils

BLOCK_BYTES = 4096
HALF = 1024
PADDING = 256


def features(content: bytes) -> np.ndarray:
    """INT32 [2048] for one file."""
    row = np.full(2 * HALF, PADDING, dtype=np.int32)
    first = np.frombuffer(content[:BLOCK_BYTES].lstrip()[:HALF], dtype=np.uint8)
    last = np.frombuffer(content[-BLOCK_BYTES:].rstrip()[-HALF:], dtype=np.uint8)
    row[: first.size] = first
    row[row.size - last.size :] = last
    return row


class TritonPythonModel:
    """CONTENT BYTES [n, 1] -> bytes INT32 [n, 2048]."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        """Declare what config.pbtxt leaves out."""
        auto_complete_model_config.add_input({"name": "CONTENT", "data_type": "TYPE_STRING", "dims": [1]})
        auto_complete_model_config.add_output({"name": "bytes", "data_type": "TYPE_INT32", "dims": [2 * HALF]})
        return auto_complete_model_config

    def initialize(self, args):
        """Nothing to load: say so in the log."""
        pb_utils.Logger.log_info(f"{args['model_instance_name']} ready")

    def execute(self, requests):
        """Answer each request with one row for each file it carries."""
        responses = []
        for request in requests:
            contents = pb_utils.get_input_tensor_by_name(request, "CONTENT").as_numpy()
            rows = np.stack([features(content) for content in contents.reshape(-1)])
            responses.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("bytes", rows)]))
        return responses

    def finalize(self):
        """Nothing to give back."""
