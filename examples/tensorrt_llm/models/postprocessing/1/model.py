"""The last step of `ensemble`: token ids as texts, in the form of TensorRT-LLM's `postprocessing`."""

import json
import os

import numpy as np
import tokenizers
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """TOKENS_BATCH [rows, texts, n] and SEQUENCE_LENGTH [rows, texts] -> OUTPUT, a text for each."""

    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        written = parameters.get("tokenizer_dir", {}).get("string_value", "")
        directory = written or os.path.join(args["model_repository"], args["model_version"])
        self.tokenizer = tokenizers.Tokenizer.from_file(os.path.join(directory, "tokenizer.json"))
        self.skips = parameters.get("skip_special_tokens", {}).get("string_value", "true").lower() in (
            "true",
            "1",
            "yes",
        )

    def execute(self, requests):
        return [self.answer({one.name(): one.as_numpy() for one in request.inputs()}) for request in requests]

    def answer(self, inputs):
        tokens, lengths = inputs["TOKENS_BATCH"], inputs["SEQUENCE_LENGTH"]
        ids = [
            text[:length].tolist()
            for row, ends in zip(tokens, lengths, strict=True)
            for text, length in zip(row, ends, strict=True)
        ]
        texts = [text.encode() for text in self.tokenizer.decode_batch(ids, skip_special_tokens=self.skips)]
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array(texts, np.object_))])
