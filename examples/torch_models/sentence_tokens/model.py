"""Split sentences into the tokens of all-MiniLM-L6-v2, with ``tokenizers`` and the model's own vocabulary."""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

MAX_TOKENS = 256
"""What the model was made for; the rest of a longer text is left out."""

MULTIPLE = 16


class TritonPythonModel:
    """TEXT BYTES [n, 1], UTF-8 -> input_ids INT64 [n, tokens], attention_mask INT64 [n, tokens], 0 where padded."""

    def initialize(self, args):
        """Read tokenizer.json, which lies beside this file."""
        self.tokenizer = Tokenizer.from_file(str(Path(__file__).with_name("tokenizer.json")))
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.enable_padding(pad_to_multiple_of=MULTIPLE)

    def execute(self, requests):
        """Answer each request; text that is not UTF-8 fails its request alone."""
        return [self._one(pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()) for request in requests]

    def _one(self, content):
        try:
            texts = [one.decode() for one in content.reshape(-1)]
        except UnicodeDecodeError as error:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"TEXT must be UTF-8: {error}", pb_utils.TritonError.INVALID_ARG)
            )
        rows = self.tokenizer.encode_batch(texts)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("input_ids", np.array([row.ids for row in rows], np.int64)),
                pb_utils.Tensor("attention_mask", np.array([row.attention_mask for row in rows], np.int64)),
            ]
        )
