"""TensorRT-LLM's tensors over a language model of this server: a python-based backend, for `--backend-directory`.

A model of this backend that has the input `text_input` takes and gives texts, as `tensorrt_llm_bls`; any other takes
and gives token ids, as `tensorrt_llm`. Each row of a request becomes one call of the model that the parameter
`language_model` names, which is of the backend `llm` or `vllm`, or has their tensors. Defaults are TensorRT-LLM's:
greedy unless `top_k` or `top_p` say otherwise, and the seed 0. What has no counterpart there is refused by name.
"""

import asyncio
import itertools
import json
import math
import os

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

# the other names of the same: those of `tensorrt_llm`, and those of older releases
RENAMED = {
    "request_output_len": "max_tokens",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "min_length": "min_tokens",
    "random_seed": "seed",
    "streaming": "stream",
}

SAME = ("min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Sampling parameters that the language model calls by the same name."""

UNUSED = ("pad_id", "length_penalty", "len_penalty", "early_stopping", "beam_search_diversity_rate")
"""Without beam search TensorRT-LLM does not use them either."""

READ = {
    *("text_input", "input_ids", "input_lengths", "max_tokens", "top_k", "top_p", "temperature", "seed", "end_id"),
    *("stream", "stop", "stop_words", "bad_words", "stop_words_list", "bad_words_list", "embedding_bias"),
    *("embedding_bias_words", "embedding_bias_weights"),
    *("exclude_input_in_output", "num_return_sequences", "return_log_probs", "return_num_input_tokens"),
    *("return_num_output_tokens", "lora_task_id", "guided_decoding_guide_type", "guided_decoding_guide"),
    *SAME,
    *UNUSED,
}

LOGITS = "logits are not given: ask for log probabilities with 'return_log_probs'"
DRAFTS = "draft tokens are not taken from requests: speculative decoding is a setting of the engine"
DECAY = "top_p does not change during a text"
ONLY = {
    "beam_width": ({1}, "there is no beam search: leave it out, or ask for several texts with 'num_return_sequences'"),
    "num_draft_tokens": ({0}, DRAFTS),
    "use_draft_logits": ({False}, DRAFTS),
    "return_context_logits": ({False}, LOGITS),
    "return_generation_logits": ({False}, LOGITS),
    "return_perf_metrics": ({False}, "the metrics page of the server has the engine's figures"),
    "return_kv_cache_reuse_stats": ({False}, "the metrics page of the server has the engine's figures"),
    "runtime_top_p_decay": ({1.0}, DECAY),
    "runtime_top_p_min": ({0.0, float(np.float32(1e-6))}, DECAY),
    "runtime_top_p_reset_ids": ({-1}, DECAY),
    # `preprocessing` of TensorRT-LLM always sends a placeholder of one token
    "decoder_input_lengths": ({0, 1}, "encoder-decoder models are not served"),
}
"""Tensors that may have some values alone: the values, and what to do about others."""

PROMPT_TABLE = "prompt tuning is not served: use an adapter and 'lora_task_id'"
LORA = "adapters are files of the language model: put it there under its number, and send 'lora_task_id' alone"
PICTURES = "this model takes texts alone: ask the language model itself, by its input 'image'"
ENCODER = "encoder-decoder models are not served"
RETENTION = "what stays in the cache is a setting of the engine"
LOOKAHEAD = "speculative decoding is a setting of the engine"
NEVER = {
    **dict.fromkeys(("prompt_embedding_table", "prompt_vocab_size"), PROMPT_TABLE),
    **dict.fromkeys(("prompt_table_extra_id", "prompt_table_extra_ids"), PROMPT_TABLE),
    **dict.fromkeys(("lora_weights", "lora_config"), LORA),
    **dict.fromkeys(("draft_input_ids", "draft_logits", "draft_acceptance_threshold"), DRAFTS),
    **dict.fromkeys(("image_input", "image_bytes_input", "image_url_input", "video_bytes_input"), PICTURES),
    **dict.fromkeys(("mrope_rotary_cos_sin", "mrope_position_deltas"), PICTURES),
    **dict.fromkeys(("decoder_text_input", "encoder_input_features", "encoder_output_lengths"), ENCODER),
    **dict.fromkeys(("cross_attention_mask", "skip_cross_attn_blocks"), ENCODER),
    **dict.fromkeys(
        (f"retention_token_range_{one}" for one in ("starts", "ends", "priorities", "durations_ms")), RETENTION
    ),
    **dict.fromkeys(("retention_decode_priority", "retention_decode_duration_ms"), RETENTION),
    **dict.fromkeys((f"lookahead_{one}" for one in ("window_size", "ngram_size", "verification_set_size")), LOOKAHEAD),
    "context_phase_params": "prefill and decode are the language model's: 'language_model' names one that has both",
}
"""Tensors that must be left out, or be empty, and what to do instead."""

KNOWN = {*READ, *RENAMED, *ONLY, *NEVER, "decoder_input_ids"}
PARAMETERS = (
    *("language_model", "tokenizer_dir", "exclude_input_in_output", "accumulate_tokens"),
    "cancellation_check_period_ms",
)
GUIDES = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
MAX_SEQUENCES = 128
"""How many texts a row may ask for: each is a request of the language model."""
BANNED = -100.0
"""The lowest bias of a token that engines take."""
SEED_BITS = 0x7FFF_FFFF_FFFF_FFFF
"""Engines take signed seeds, and -1 for none."""


class Refused(Exception):
    """What is wrong with a request."""


class TritonPythonModel:
    """See the head of the file. Each request is a task of the event loop, so one instance serves many."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.name = args["model_name"]
        self.batches = config["max_batch_size"] > 0
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        names = [one["name"] for one in config["input"]]
        self.takes_text = "text_input" in names
        unknown = [name for name in names if name not in KNOWN]
        if unknown:
            raise pb_utils.TritonModelException(
                f"model '{self.name}': the input '{unknown[0]}' is none of TensorRT-LLM's that this backend knows: "
                "remove it from the configuration"
            )
        written = {key: one.get("string_value", "") for key, one in config.get("parameters", {}).items()}
        written = {key: value for key, value in written.items() if value and not value.startswith("${")}
        self.language_model = written.get("language_model", "")
        if not self.language_model:
            raise pb_utils.TritonModelException(
                f"model '{self.name}': the parameter 'language_model' must name the model that generates the text, "
                "one of the backend llm or vllm"
            )
        self.excludes_input = written.get("exclude_input_in_output", "").lower() in ("1", "true")
        self.accumulates = written.get("accumulate_tokens", "").lower() in ("true", "yes", "1", "t")
        period = written.get("cancellation_check_period_ms", "100")
        if not period.isdecimal() or int(period) < 1:
            raise pb_utils.TritonModelException(
                f"model '{self.name}': the parameter 'cancellation_check_period_ms' is '{period}', expected a whole "
                "number of 1 or more"
            )
        self.check_s = int(period) / 1000
        self.tokenizer = None
        if "tokenizer_dir" in written:
            import tokenizers

            self.tokenizer = tokenizers.Tokenizer.from_file(os.path.join(written["tokenizer_dir"], "tokenizer.json"))
        self.running = {}
        """By the id of a request, the calls that are open for it."""
        without = sorted(key for key in written if key not in PARAMETERS and not key.startswith("charonia."))
        if without:
            pb_utils.Logger.log_warn(
                f"model '{self.name}': parameters of TensorRT-LLM's engine have no effect here, "
                f"'{self.language_model}' has its own: {', '.join(without)}"
            )

    async def execute(self, requests):
        await asyncio.gather(*map(self.answer, requests))

    async def answer(self, request):
        """Answer one request, whatever is wrong with it."""
        sender = request.get_response_sender()
        try:
            inputs = read_inputs(request, self.batches)
            if inputs.pop("stop", np.zeros(1)).any():
                self.stop(request.request_id(), sender)
                return
            calls = self.calls(inputs)
        except Refused as error:
            sender.send(pb_utils.InferenceResponse(error=refusal(str(error))), flags=FINAL)
            return
        opened = self.running.setdefault(request.request_id(), [])
        try:
            ends = (self.generate(call, sender, opened) for call in calls)
            errors = [failure(end) for end in await asyncio.gather(*ends, return_exceptions=True)]
        finally:
            if self.running.get(request.request_id()) is opened:
                del self.running[request.request_id()]
        for error in filter(None, errors[1:]):
            sender.send(pb_utils.InferenceResponse(error=error))
        if errors[0] is not None:
            sender.send(pb_utils.InferenceResponse(error=errors[0]), flags=FINAL)
        elif self.decoupled:
            sender.send(flags=FINAL)

    def stop(self, identity, sender):
        """End the request of the same id, as clients of TensorRT-LLM ask for it."""
        if not identity:
            raise Refused("A request id must be provided for request cancellation")
        for responses in self.running.get(identity, ()):
            responses.cancel()
        sender.send(pb_utils.InferenceResponse([]), flags=FINAL)

    def calls(self, inputs):
        """The calls that a request needs, one for each row and sequence. Raises `Refused`."""
        prompt = "text_input" if self.takes_text else "input_ids"
        if prompt not in inputs:
            raise Refused(f"A value is required for {prompt}")
        rows = len(inputs[prompt])
        calls = []
        for row in range(rows):
            one = Row({name: array[row].reshape(-1) for name, array in inputs.items()}, self)
            sequences = one.number("num_return_sequences", 1)
            if not 1 <= sequences <= MAX_SEQUENCES:
                raise Refused(f"tensor 'num_return_sequences' is {sequences}, expected 1 to {MAX_SEQUENCES}")
            for sequence in range(sequences):
                labels = {"batch_index": row} if rows > 1 else {}
                if sequences > 1:
                    labels["sequence_index"] = sequence
                calls.append((one, one.call(sequence), labels))
        if len(calls) > 1 and not self.decoupled:
            raise Refused(
                f"{len(calls)} texts are asked for in one request, expected 1: a model that is not decoupled gives "
                "one response; send requests of one row without 'num_return_sequences'"
            )
        return calls

    async def generate(self, call, sender, opened):
        """Make one call, and send on what it gives. Returns the error that ended it, None without one."""
        row, arguments, labels = call
        responses = await pb_utils.InferenceRequest(model_name=self.language_model, **arguments).async_exec(
            decoupled=True
        )
        opened.append(responses)
        watcher = asyncio.create_task(self.watch(sender, responses))
        flags = 0 if self.decoupled else FINAL
        before = b""
        try:
            async for response in responses:
                if response.has_error():
                    error = response.error()
                    stopped = error.code() == pb_utils.TritonError.CANCELLED and not sender.is_cancelled()
                    return None if stopped else error  # what was stopped by 'stop' ends as a text does
                if response.output_tensors():
                    given = {one.name(): one.as_numpy() for one in response.output_tensors()}
                    if self.accumulates and row.streams:
                        before += given["text_output"][0]
                        given["text_output"] = np.array([before], np.object_)
                    outputs = row.outputs(given, labels)
                    sender.send(pb_utils.InferenceResponse(outputs), flags=flags)
            return None
        finally:
            watcher.cancel()

    async def watch(self, sender, responses):
        """End the call when the client has given up. The server does it where no other request shares the batch."""
        cancelled = False
        while not cancelled:
            await asyncio.sleep(self.check_s)
            cancelled = sender.is_cancelled()
        responses.cancel()


class Row:
    """One row of a request: the values of its tensors by name, each flat."""

    def __init__(self, values, model):
        self.values = values
        self.model = model
        self.refuse()
        self.streams = bool(self.number("stream", False))
        if self.streams and not model.decoupled:
            raise Refused("Streaming is only supported in decoupled mode.")
        self.prompt = self.text("text_input") if model.takes_text else self.tokens()
        self.includes_input = not self.streams and not self.number("exclude_input_in_output", model.excludes_input)
        self.wants_log_probs = bool(self.number("return_log_probs", False))

    def refuse(self):
        for name, values in self.values.items():
            if name in NEVER and len(values):
                raise Refused(f"tensor '{name}' is not supported, expected none: {NEVER[name]}")
            if name in ONLY:
                value = self.number(name, None)
                allowed, remedy = ONLY[name]
                if value not in allowed:
                    expected = " or ".join(map(str, sorted(allowed)))
                    raise Refused(f"tensor '{name}' is {value}, expected {expected}: {remedy}")
        if len(self.values.get("decoder_input_ids", ())) > 1:
            raise Refused(f"tensor 'decoder_input_ids' is not supported, expected none: {ENCODER}")

    def number(self, name, default):
        if name not in self.values:
            return default
        if len(self.values[name]) != 1:
            raise Refused(f"tensor '{name}' has {len(self.values[name])} elements for a text, expected 1")
        found = self.values[name][0].item()
        if isinstance(found, float) and not math.isfinite(found):
            raise Refused(f"tensor '{name}' is {found}, expected a finite number")
        return found

    def texts(self, name):
        try:
            return [one.decode() for one in self.values.get(name, ())]
        except UnicodeDecodeError as error:
            raise Refused(f"tensor '{name}' is not UTF-8: {error}") from None

    def text(self, name):
        found = self.texts(name)
        if len(found) != 1:
            raise Refused(f"tensor '{name}' has {len(found)} elements for a text, expected 1")
        return found[0]

    def tokens(self):
        ids = self.values["input_ids"]
        length = self.number("input_lengths", len(ids))
        if not 0 < length <= len(ids):
            raise Refused(f"tensor 'input_lengths' is {length}, expected 1 to {len(ids)}, the length of 'input_ids'")
        return ids[:length].astype(np.int32)

    def call(self, sequence):
        """The arguments of the call, but for the model's name. Sequences differ in their seeds."""
        wants_tokens = not self.model.takes_text or self.wants_log_probs
        flags = {
            "stream": self.streams,
            "exclude_input_in_output": not (self.includes_input and self.model.takes_text),
            "return_cumulative_logprob": self.wants_log_probs,
            "return_logprobs": self.wants_log_probs,
            "return_token_ids": wants_tokens,
            "return_num_input_tokens": bool(self.number("return_num_input_tokens", False)),
            "return_num_output_tokens": bool(self.number("return_num_output_tokens", False)),
        }
        inputs = [pb_utils.Tensor(name, np.array([value])) for name, value in flags.items() if value]
        if self.model.takes_text:
            inputs.append(pb_utils.Tensor("text_input", np.array([self.prompt.encode()], np.object_)))
        else:
            inputs.append(pb_utils.Tensor("prompt_token_ids", self.prompt))
        sampling = json.dumps(self.sampling(sequence)).encode()
        inputs.append(pb_utils.Tensor("sampling_parameters", np.array([sampling], np.object_)))
        wanted = [name.removeprefix("return_") for name, value in flags.items() if value and name.startswith("return_")]
        return {"inputs": inputs, "requested_output_names": ["text_output", *wanted]}

    def sampling(self, sequence):
        """The sampling parameters, with the language model's names."""
        max_tokens = self.number("max_tokens", 0)
        if max_tokens < 1:
            raise Refused("max_tokens must be a single value > 0")
        found = {name: self.number(name, None) for name in SAME if name in self.values}
        found["max_tokens"] = max_tokens
        top_k, top_p = self.number("top_k", 0), self.number("top_p", 0.0)
        if top_k == 0 and top_p <= 0.0:
            found["temperature"] = 0.0
        else:
            found["temperature"] = self.number("temperature", 1.0)
            found["top_k"] = top_k
            if top_p > 0.0:
                found["top_p"] = top_p
        found["seed"] = (self.number("seed", 0) + sequence) & SEED_BITS
        if self.wants_log_probs:
            found["logprobs"] = 0
        if "lora_task_id" in self.values:
            found["lora_name"] = str(self.number("lora_task_id", None))
        self.guide(found)
        self.stops(found)
        self.biases(found)
        return found

    def guide(self, found):
        if "guided_decoding_guide_type" not in self.values:
            if "guided_decoding_guide" in self.values:
                raise Refused("tensor 'guided_decoding_guide' has no type, expected 'guided_decoding_guide_type'")
            return
        kind = self.text("guided_decoding_guide_type")
        if kind == "json":
            found["structured_outputs"] = {"json_object": True}
        elif kind in GUIDES:
            found["structured_outputs"] = {GUIDES[kind]: self.text("guided_decoding_guide")}
        else:
            expected = ", ".join(("json", *GUIDES))
            raise Refused(f"tensor 'guided_decoding_guide_type' is '{kind}', expected one of {expected}")

    def stops(self, found):
        """When a text ends: at an end token, or after a stop word, which is part of it."""
        texts = [word for word in self.texts("stop_words") if word]
        tokens = []
        for word in self.words("stop_words_list"):
            if len(word) == 1:
                tokens += word
            else:
                texts.append(self.decoded("stop_words_list", word))
        end = self.number("end_id", None if self.model.takes_text else -1)
        if end is not None:
            found["ignore_eos"] = True  # the end token of the request takes its place
            if end >= 0:
                tokens.append(end)
        if tokens:
            found["stop_token_ids"] = tokens
        if texts:
            found["stop"] = texts
            found["include_stop_str_in_output"] = True

    def biases(self, found):
        """Which tokens are more or less likely, and which words do not come."""
        texts = [word for word in self.texts("bad_words") if word]
        biases = {}
        for name in ("embedding_bias", "embedding_bias_weights"):
            if not np.isfinite(self.values.get(name, 0.0)).all():
                raise Refused(f"tensor '{name}' has values that are no finite numbers")
        bias = self.values.get("embedding_bias", np.zeros(0))
        for token in np.flatnonzero(bias).tolist():
            biases[token] = float(bias[token])
        words, weights = self.texts("embedding_bias_words"), self.values.get("embedding_bias_weights", ())
        if len(words) != len(weights):
            raise Refused("Embedding bias words must have same dimension as embedding bias weights")
        for word, weight in zip(words, weights, strict=True):
            for token in self.encoded("embedding_bias_words", word):
                biases[token] = biases.get(token, 0.0) + float(weight)
        for word in self.words("bad_words_list"):
            if len(word) == 1:
                biases[word[0]] = BANNED
            else:
                texts.append(self.decoded("bad_words_list", word))
        if biases:
            found["logit_bias"] = biases
        if texts:
            found["bad_words"] = texts

    def words(self, name):
        """The token ids of each word of a list in TensorRT-LLM's form: ids, and where words end, -1 for padding."""
        values = self.values.get(name, np.zeros(0, np.int32))
        if len(values) % 2:
            raise Refused(f"tensor '{name}' has {len(values)} elements, expected two rows: ids, and where words end")
        ids, ends = values.reshape(2, -1).tolist()
        if min(ids, default=0) < 0:
            raise Refused(f"tensor '{name}' has the token {min(ids)}, expected 0 or more")
        ends = [0, *(end for end in ends if end != -1)]
        if ends != sorted(ends) or ends[-1] > len(ids):
            raise Refused(f"tensor '{name}' has words that end at {ends[1:]}, expected rising ends up to {len(ids)}")
        return [ids[begin:end] for begin, end in itertools.pairwise(ends) if end > begin]

    def decoded(self, name, word):
        if self.model.tokenizer is None:
            raise Refused(
                f"tensor '{name}' has a word of {len(word)} tokens, expected one token: give model '{self.model.name}' "
                "the parameter 'tokenizer_dir', which makes texts of such words"
            )
        return self.model.tokenizer.decode(word, skip_special_tokens=False)

    def encoded(self, name, word):
        if self.model.tokenizer is None:
            raise Refused(
                f"tensor '{name}' has words, expected none: give model '{self.model.name}' the parameter "
                "'tokenizer_dir', which makes tokens of them"
            )
        return self.model.tokenizer.encode(word, add_special_tokens=False).ids

    def outputs(self, given, labels):
        """A response of the language model as TensorRT-LLM's tensors."""
        found = []

        def add(name, array):
            found.append(pb_utils.Tensor(name, array[np.newaxis] if self.model.batches else array))

        if self.model.takes_text:
            # as of TensorRT-LLM's detokenizer, which has no dimension for the batch
            found.append(pb_utils.Tensor("text_output", given["text_output"]))
        else:
            tokens = given["token_ids"].astype(np.int32)
            if self.includes_input:
                tokens = np.concatenate([self.prompt, tokens])
            add("output_ids", tokens[np.newaxis])
            add("sequence_length", np.array([len(tokens)], np.int32))
        if self.wants_log_probs:
            chosen = given["token_ids"].tolist()
            each = json.loads(given["logprobs"][0])
            probs = [one[str(token)]["logprob"] for token, one in zip(chosen, each, strict=True)]
            add("cum_log_probs", given["cumulative_logprob"].astype(np.float32).reshape(1))
            add("output_log_probs", np.array([probs], np.float32))
        for name in ("num_input_tokens", "num_output_tokens"):
            if name in given:
                add(name, given[name].astype(np.int32).reshape(1))
        for name, value in labels.items():
            add(name, np.array([value], np.int32))
        return found


def read_inputs(request, batches):
    """The tensors of a request by name, each with a dimension for its rows. Empty ones count as left out."""
    found = {}
    for tensor in request.inputs():
        array = tensor.as_numpy()
        if array.size == 0 and tensor.name() not in ("text_input", "input_ids"):
            continue
        found[RENAMED.get(tensor.name(), tensor.name())] = array if batches else array[np.newaxis]
    return found


def failure(end):
    """The error of a call that ended with one or raised it."""
    return pb_utils.TritonError(str(end)) if isinstance(end, Exception) else end


def refusal(text):
    return pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG)
