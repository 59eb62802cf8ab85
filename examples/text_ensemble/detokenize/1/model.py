"""The last step of `smollm2_text`: the language model's token ids as a text, without its special tokens."""

import os

import numpy as np
import tokenizers
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """TOKENS (INT32 [n]) -> TEXT (BYTES [1])."""

    def initialize(self, args):
        directory = os.path.join(args["model_repository"], args["model_version"])
        self.tokenizer = tokenizers.Tokenizer.from_file(os.path.join(directory, "tokenizer.json"))

    def execute(self, requests):
        responses = []
        for request in requests:
            tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS").as_numpy().tolist()
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            output = pb_utils.Tensor("TEXT", np.array([text.encode()], np.object_))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
