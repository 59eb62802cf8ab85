"""The first step of `smollm2_text`: a prompt as token ids, and that the language model is to answer with token ids."""

import os

import numpy as np
import tokenizers
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """TEXT (BYTES [1]) -> TOKENS (INT32 [n]) and WANTS_TOKENS (BOOL [1], true)."""

    def initialize(self, args):
        directory = os.path.join(args["model_repository"], args["model_version"])
        self.tokenizer = tokenizers.Tokenizer.from_file(os.path.join(directory, "tokenizer.json"))

    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0].decode()
            tokens = np.array(self.tokenizer.encode(text).ids, np.int32)
            outputs = [pb_utils.Tensor("TOKENS", tokens), pb_utils.Tensor("WANTS_TOKENS", np.array([True]))]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
