"""Python models of the tasks of the OpenAI API other than texts, each of which does its work.

`scores` compares the words of two texts, `moderates` finds words of a list, `tones` reads the digits that a telephone's
keys sound (DTMF) from a WAV file. `vectors` embeds with the tensors of Triton's vLLM backend.
"""

from __future__ import annotations

import io
import wave
from pathlib import Path

import numpy as np
from e2e_models import python

_HEAD = """
import io, math, wave
import numpy as np
import triton_python_backend_utils as pb_utils

def rows(request, name):
    return [bytes(one) for one in pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)]
"""

SCORES = (
    _HEAD
    + '''
class TritonPythonModel:
    """The share of words that two texts have in common."""

    def execute(self, requests):
        answers = []
        for request in requests:
            pairs = zip(rows(request, "query"), rows(request, "document"), strict=True)
            found = []
            for query, document in pairs:
                one, other = set(query.lower().split()), set(document.lower().split())
                found.append([len(one & other) / max(1, len(one | other))])
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("score", np.array(found, np.float32))]))
        return answers
'''
)
SCORES_CONFIG = """
max_batch_size: 64
dynamic_batching { }
input { name: "query" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "document" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "score" data_type: TYPE_FP32 dims: [ 1 ] }
parameters { key: "charonia.openai_task" value { string_value: "score" } }
"""

MODERATES = (
    _HEAD
    + '''
WORDS = ({b"hit", b"kill"}, {b"buy", b"offer"})


class TritonPythonModel:
    """Of each category: one minus a half for each of its words in the text."""

    def execute(self, requests):
        answers = []
        for request in requests:
            texts = [text.lower().split() for text in rows(request, "text")]
            found = [[1 - 0.5 ** sum(word in words for word in text) for words in WORDS] for text in texts]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("scores", np.array(found, np.float32))]))
        return answers
'''
)
MODERATES_CONFIG = """
max_batch_size: 64
input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "categories.txt" }
parameters { key: "charonia.openai_task" value { string_value: "moderate" } }
parameters { key: "charonia.moderation_threshold" value { string_value: "0.5" } }
"""

LOW, HIGH = (697, 770, 852, 941), (1209, 1336, 1477)
KEYS = ("123", "456", "789", "*0#")

TONES = (
    _HEAD
    + f"LOW, HIGH, KEYS = {LOW}, {HIGH}, {KEYS}\n"
    + '''

def power(samples, hertz, rate):
    at = np.exp(-2j * math.pi * hertz / rate * np.arange(len(samples)))
    return abs(samples @ at) / max(1, len(samples))


class TritonPythonModel:
    """A key for each run of windows of 40 ms in which two of its frequencies are loud; a response for each key."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            (data,) = rows(request, "audio")
            try:
                with wave.open(io.BytesIO(data)) as file:
                    rate = file.getframerate()
                    samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
            except (wave.Error, EOFError) as error:
                sender.send(
                    pb_utils.InferenceResponse(error=pb_utils.TritonError(f"no WAV file: {error}")),
                    flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
                )
                continue
            before = None
            for begin in range(0, len(samples), rate // 25):
                window = samples[begin : begin + rate // 25]
                low, high = ([power(window, one, rate) for one in group] for group in (LOW, HIGH))
                key = KEYS[int(np.argmax(low))][int(np.argmax(high))] if min(max(low), max(high)) > 0.05 else None
                if key is not None and key != before:
                    text = pb_utils.Tensor("text_output", np.array([key.encode()], np.object_))
                    sender.send(pb_utils.InferenceResponse([text]))
                before = key
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
'''
)
TONES_CONFIG = """
max_batch_size: 0
model_transaction_policy { decoupled: true }
input { name: "audio" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
parameters { key: "charonia.openai_task" value { string_value: "transcribe" } }
"""


VECTORS = (
    "import json\n"
    + _HEAD
    + '''
class TritonPythonModel:
    """With the tensors of Triton's vLLM backend: how often a text has the letters a, b, c and d."""

    def execute(self, requests):
        for request in requests:
            (asked,) = (json.loads(one) for one in rows(request, "embedding_request"))
            given = asked["input"]
            letters = given if isinstance(given, str) else "".join(map(chr, given))
            (size,) = asked["pooling_params"].get("dimensions", [4])
            counts = json.dumps([letters.count("abcd"[at]) for at in range(size)])
            found = [pb_utils.Tensor("text_output", np.array([counts], np.object_))]
            found.append(pb_utils.Tensor("num_input_tokens", np.array([len(letters)], np.uint32)))
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            request.get_response_sender().send(pb_utils.InferenceResponse(found), flags=final)
'''
)
VECTORS_CONFIG = """
model_transaction_policy { decoupled: true }
input { name: "embedding_request" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "return_num_input_tokens" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ -1 ] }
"""


def write(repository: Path) -> None:
    """Write the four models."""
    python(repository, "vectors", VECTORS, VECTORS_CONFIG)
    python(repository, "scores", SCORES, SCORES_CONFIG)
    python(repository, "moderates", MODERATES, MODERATES_CONFIG)
    (repository / "moderates" / "categories.txt").write_text("violence\nspam\n")
    python(repository, "tones", TONES, TONES_CONFIG)


def recording(keys: str, rate: int = 8000) -> bytes:
    """A WAV file of these keys, each for 200 ms with a pause of 120 ms."""
    parts = []
    seconds = np.arange(rate // 5) / rate
    for key in keys:
        (row,) = (at for at, line in enumerate(KEYS) if key in line)
        tones = (LOW[row], HIGH[KEYS[row].index(key)])
        parts += [sum(0.3 * np.sin(2 * np.pi * one * seconds) for one in tones), np.zeros(rate * 3 // 25)]
    samples = (np.concatenate(parts) * 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(rate)
        written.writeframes(samples.tobytes())
    return file.getvalue()
