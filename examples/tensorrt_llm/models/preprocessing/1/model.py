"""The first step of `ensemble`: texts as token ids, in the form of TensorRT-LLM's `preprocessing`."""

import json
import os

import numpy as np
import tokenizers
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """QUERY -> INPUT_ID and REQUEST_INPUT_LEN; lists of words as their ids, and where each word ends."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        written = config["parameters"].get("tokenizer_dir", {}).get("string_value", "")
        directory = written or os.path.join(args["model_repository"], args["model_version"])
        self.tokenizer = tokenizers.Tokenizer.from_file(os.path.join(directory, "tokenizer.json"))
        with open(os.path.join(directory, "tokenizer_config.json")) as file:
            settings = json.load(file)
        self.end = self.token(settings.get("eos_token"), -1)
        self.pad = self.token(settings.get("pad_token"), self.end)

    def token(self, written, default):
        text = written.get("content") if isinstance(written, dict) else written
        found = None if text is None else self.tokenizer.token_to_id(text)
        return default if found is None else found

    def execute(self, requests):
        return [self.answer({one.name(): one.as_numpy() for one in request.inputs()}) for request in requests]

    def answer(self, inputs):
        for name in ("QUERY", "BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS"):
            try:
                for text in inputs.get(name, np.empty(0)).flat:
                    text.decode()
            except UnicodeDecodeError as error:
                refusal = pb_utils.TritonError(
                    f"tensor '{name}' is not UTF-8: {error}", pb_utils.TritonError.INVALID_ARG
                )
                return pb_utils.InferenceResponse(error=refusal)
        rows = [self.tokenizer.encode(row[0].decode()).ids for row in inputs["QUERY"]]
        longest = max(map(len, rows))
        outputs = {
            "INPUT_ID": np.array([ids + [self.pad] * (longest - len(ids)) for ids in rows], np.int32),
            "REQUEST_INPUT_LEN": np.array([[len(ids)] for ids in rows], np.int32),
            "REQUEST_OUTPUT_LEN": inputs["REQUEST_OUTPUT_LEN"],
            "BAD_WORDS_IDS": self.words(inputs.get("BAD_WORDS_DICT"), len(rows)),
            "STOP_WORDS_IDS": self.words(inputs.get("STOP_WORDS_DICT"), len(rows)),
            "EMBEDDING_BIAS": self.biases(inputs, len(rows)),
            "OUT_END_ID": inputs.get("END_ID", np.full((len(rows), 1), self.end, np.int32)),
            "OUT_PAD_ID": inputs.get("PAD_ID", np.full((len(rows), 1), self.pad, np.int32)),
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])

    def words(self, given, rows):
        """INT32 [rows, 2, n]: the ids of a row's words one after the other, and where each ends; -1 fills up."""
        if given is None:
            return np.empty((rows, 2, 0), np.int32)
        encoded = [
            [self.tokenizer.encode(word.decode(), add_special_tokens=False).ids for word in row] for row in given
        ]
        width = max(1, *(sum(map(len, row)) for row in encoded))
        found = np.zeros((rows, 2, width), np.int32)
        found[:, 1] = -1
        for at, row in enumerate(encoded):
            ids = [token for word in row for token in word]
            ends = np.cumsum([len(word) for word in row if word])
            found[at, 0, : len(ids)] = ids
            found[at, 1, : len(ends)] = ends
        return found

    def biases(self, inputs, rows):
        words, weights = inputs.get("EMBEDDING_BIAS_WORDS"), inputs.get("EMBEDDING_BIAS_WEIGHTS")
        if words is None or weights is None:
            return np.empty((rows, 0), np.float32)
        if words.shape != weights.shape:
            raise pb_utils.TritonModelException(
                "Embedding bias words must have same dimension as embedding bias weights"
            )
        found = np.zeros((rows, self.tokenizer.get_vocab_size()), np.float32)
        for at in range(rows):
            for word, weight in zip(words[at], weights[at], strict=True):
                for token in self.tokenizer.encode(word.decode(), add_special_tokens=False).ids:
                    found[at, token] += weight
        return found
