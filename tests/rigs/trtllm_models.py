"""The example with TensorRT-LLM's tensors, over the language model of `text_backend` or a real one."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from e2e_server import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "tensorrt_llm"
BACKENDS = EXAMPLE / "backends"
WHOLE = "tensorrt_llm_whole"
"""`tensorrt_llm_bls` without the decoupled policy, which `infer` over HTTP can ask."""

TYPES = {
    **dict.fromkeys(("text_input", "bad_words", "stop_words", "embedding_bias_words"), "BYTES"),
    **dict.fromkeys(("guided_decoding_guide_type", "guided_decoding_guide", "decoder_text_input"), "BYTES"),
    **dict.fromkeys(("image_url_input", "sampling_parameters"), "BYTES"),
    **dict.fromkeys(("top_p", "temperature", "length_penalty", "len_penalty", "repetition_penalty"), "FP32"),
    **dict.fromkeys(
        ("presence_penalty", "frequency_penalty", "embedding_bias_weights", "embedding_bias", "runtime_top_p"), "FP32"
    ),
    **dict.fromkeys(("runtime_top_p_decay", "draft_logits"), "FP32"),
    **dict.fromkeys(("prompt_embedding_table", "lora_weights", "image_input"), "FP16"),
    **dict.fromkeys(("seed", "lora_task_id", "prompt_table_extra_id"), "UINT64"),
    **dict.fromkeys(("stream", "streaming", "stop", "exclude_input_in_output", "use_draft_logits"), "BOOL"),
    **dict.fromkeys(("return_log_probs", "return_context_logits", "return_generation_logits"), "BOOL"),
    **dict.fromkeys(("return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"), "BOOL"),
}
"""Those of tensors that are not INT32."""


def write_example(repository: Path, language_model: str, tokenizer_dir: Path) -> None:
    """The example's models as a user would fill them in."""
    shutil.copytree(EXAMPLE / "models", repository, dirs_exist_ok=True)
    for file in repository.glob("*/config.pbtxt"):
        text = file.read_text().replace('"smollm2"', f'"{language_model}"')
        text = text.replace('"${tokenizer_dir}"', f'"{tokenizer_dir}"')
        key = 'key: "tokenizer_dir" value { string_value: "'
        file.write_text(text.replace(f'{key}"', f'{key}{tokenizer_dir}"'))
    bls = (repository / "tensorrt_llm_bls" / "config.pbtxt").read_text()
    (repository / WHOLE / "1").mkdir(parents=True)
    (repository / WHOLE / "config.pbtxt").write_text(bls.replace("decoupled: true", "decoupled: false"))


def tensors(client: Any, values: Mapping[str, Any], *, rows: bool = True) -> list[Any]:
    """Inputs of `tritonclient` (`grpc` or `http`, as `client` is), one row each, as clients of TensorRT-LLM make them.

    Without `rows` they have no dimension for it.
    """
    found = []
    for name, value in values.items():
        kind = TYPES.get(name, "INT32")
        dtype = {"BYTES": np.object_, "BOOL": np.bool_, "FP16": np.float16, "FP32": np.float32, "UINT64": np.uint64}
        array = np.asarray(value, dtype.get(kind, np.int32))
        array = np.atleast_1d(array)
        array = array[np.newaxis] if rows and array.ndim < 2 else array
        if array.size and kind == "BYTES":
            array = np.vectorize(lambda one: one if isinstance(one, bytes) else str(one).encode(), otypes=[np.object_])(
                array
            )
        tensor = client.InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        found.append(tensor)
    return found


class Refusal(Exception):
    """The error of a request on a stream."""


class Asker:
    """A gRPC stream of the stock client."""

    def __init__(self, address: str, *, rows: bool = True) -> None:
        self._rows = rows
        self.client = grpcclient.InferenceServerClient(address)
        self._answers: queue.Queue[Any] = queue.Queue()
        self.client.start_stream(lambda result, error: self._answers.put((result, error)))

    def begin(self, model: str, identity: str = "", **values: Any) -> None:
        inputs = tensors(grpcclient, values, rows=self._rows)
        self.client.async_stream_infer(model, inputs, request_id=identity, enable_empty_final_response=True)

    def next(self) -> tuple[Any, bool]:
        """The next response, and whether it ends its request. Raises `Refusal`."""
        result, error = self._answers.get(timeout=60)
        if error is not None:
            raise Refusal(str(error.message()))
        return result, result.get_response().parameters["triton_final_response"].bool_param

    def ask(self, model: str, **values: Any) -> list[Any]:
        """The responses of a request that have outputs."""
        self.begin(model, **values)
        found, final = [], False
        while not final:
            result, final = self.next()
            if result.get_response().outputs:
                found.append(result)
        return found

    def texts(self, model: str, **values: Any) -> list[str]:
        return [one.as_numpy("text_output")[0].decode() for one in self.ask(model, **values)]

    def close(self) -> None:
        self.client.stop_stream()
        self.client.close()
