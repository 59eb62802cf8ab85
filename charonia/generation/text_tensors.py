"""The tensors of a model that generates text: those of Triton's vLLM backend, and what Charonia adds to them.

A request has a prompt and the parameters of sampling as JSON. A response has the text and the tokens that came since
the response before; its last has a finish reason.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextTensor:
    """One tensor of the interface. `datatype` is a v2 name. `added`: Triton's backend does not have it."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False
    added: bool = False


INPUTS = (
    TextTensor("text_input", "BYTES", (1,), optional=True),
    TextTensor("stream", "BOOL", (1,), optional=True),
    TextTensor("sampling_parameters", "BYTES", (1,), optional=True),
    TextTensor("exclude_input_in_output", "BOOL", (1,), optional=True),
    TextTensor("return_finish_reason", "BOOL", (1,), optional=True),
    TextTensor("return_cumulative_logprob", "BOOL", (1,), optional=True),
    TextTensor("return_logprobs", "BOOL", (1,), optional=True),
    TextTensor("return_num_input_tokens", "BOOL", (1,), optional=True),
    TextTensor("return_num_output_tokens", "BOOL", (1,), optional=True),
    TextTensor("prompt_token_ids", "INT32", (-1,), optional=True, added=True),
    TextTensor("return_token_ids", "BOOL", (1,), optional=True, added=True),
)
"""`text_input` or `prompt_token_ids` has to be there. `sampling_parameters` is a JSON object with vLLM's names:
`temperature`, `top_p`, `top_k`, `min_p`, `max_tokens`, `min_tokens`, `stop` (a string or a list),
`include_stop_str_in_output`, `stop_token_ids`, `ignore_eos`, `seed`, `presence_penalty`, `frequency_penalty`,
`repetition_penalty`, `logit_bias` (token id to bias), `allowed_token_ids`, `logprobs`, `logprob_token_ids`,
`prompt_logprobs`, `bad_words`, `skip_special_tokens`, "structured_outputs" (`json`, `regex`, `choice`, `grammar` or
`json_object`) and "lora_name"."""

STREAM_INTERVAL = TextTensor("stream_interval", "INT32", (1,), optional=True, added=True)
"""With `stream`, a response comes after so many tokens (1 or more) and after the last one. The name is that of vLLM's
option. A text that no client follows is kept in the log by such parts."""
RETURN_PROMPT_LOGPROBS = TextTensor("return_prompt_logprobs", "BOOL", (1,), optional=True, added=True)
"""Asks for `PROMPT_LOGPROBS`; the parameter of sampling `prompt_logprobs` says with how many candidates."""
ENGINE_INPUTS = (*INPUTS, STREAM_INTERVAL, RETURN_PROMPT_LOGPROBS)
"""The inputs of models that our own engines run."""

UNFINISHED = "None"
"""The finish reason of all responses but the last, as Triton's backend says it."""

OUTPUTS = (
    TextTensor("text_output", "BYTES", (-1,)),
    TextTensor("finish_reason", "BYTES", (-1,)),
    TextTensor("cumulative_logprob", "FP32", (-1,)),
    TextTensor("logprobs", "BYTES", (-1,)),
    TextTensor("num_input_tokens", "UINT32", (-1,)),
    TextTensor("num_output_tokens", "UINT32", (-1,)),
    TextTensor("token_ids", "INT32", (-1,), added=True),
)
"""`finish_reason` is `UNFINISHED` until the last response, then "stop" (an end token, a stop string, a grammar that
is complete) or "length". `logprobs` is JSON: for each new token an object from token id to `{"logprob", "rank",
"decoded_token"}`, as vLLM's. `num_input_tokens` counts the prompt, `num_output_tokens` the tokens of this response."""

PROMPT_LOGPROBS = TextTensor("prompt_logprobs", "BYTES", (-1,), added=True)
"""In the first response, JSON: for each token of the prompt an object as of `logprobs`, the token itself first; null
for the first token, which nothing precedes. In later responses, and where it was not asked for, null."""
ENGINE_OUTPUTS = (*OUTPUTS, PROMPT_LOGPROBS)
"""The outputs of models that our own engines run."""

ADAPTERS_PARAMETER = "charonia.adapters"
"""A parameter of a loaded configuration: the names of the model's adapters, as a JSON array or divided by commas."""

ASSETS_PARAMETER = "charonia.text_assets"
"""A parameter of the loaded configuration: the digest of the blob that holds the model's tokenizer and template."""
