"""One model over two: `prefill` reads the prompt, `decode` goes on with the keys and values that it computed.

The first is asked for one token, and answers where keys and values are; the second gets that beside the request and
generates the whole text, the first token included. What is passed on is vLLM's `kv_transfer_params`, unread. A half
whose executor is lost runs again by itself; where blocks went with it, both halves run again, as long as nothing was
sent.
"""

import asyncio
import json

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
ASKS_FOR_TRANSFER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
RUNS = 3
"""How often both halves are tried."""
LOST = (pb_utils.TritonError.UNAVAILABLE, pb_utils.TritonError.INTERNAL)
"""What a half ends with when keys and values are gone: the other errors would come again."""


class TritonPythonModel:
    """The tensors are those of the backend vllm. The parameters `prefill` and `decode` name the two models."""

    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.prefill_model = parameters["prefill"]["string_value"]
        self.decode_model = parameters["decode"]["string_value"]

    async def execute(self, requests):
        await asyncio.gather(*map(self.answer, requests))

    async def answer(self, request):
        sender = request.get_response_sender()
        inputs = {tensor.name(): tensor for tensor in request.inputs()}
        written = inputs.pop("sampling_parameters", None)
        try:
            sampling = {} if written is None else json.loads(written.as_numpy()[0])
            if not isinstance(sampling, dict):
                raise ValueError("not an object")
        except ValueError as error:
            refusal = pb_utils.TritonError(
                f"tensor 'sampling_parameters' is no JSON object: {error}", pb_utils.TritonError.INVALID_ARG
            )
            sender.send(pb_utils.InferenceResponse(error=refusal), flags=FINAL)
            return
        for run in range(RUNS):
            transfer, error = await self.prefill(inputs, sampling)
            began = False
            if error is None:
                error, began = await self.decode(inputs, sampling, transfer, request.requested_output_names(), sender)
                if not began and (error is not None or sender.is_cancelled()):
                    await self.release(inputs, sampling, transfer)
            if error is None or began or error.code() not in LOST or sender.is_cancelled() or run == RUNS - 1:
                break
        if error is None:
            sender.send(flags=FINAL)
        else:
            sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)

    async def prefill(self, inputs, sampling):
        """What the first half says about keys and values, or its error."""
        flags = [flag("stream", False), flag("exclude_input_in_output", True), flag("return_kv_transfer_params", True)]
        prompt = [inputs[name] for name in ("text_input", "prompt_token_ids", "image") if name in inputs]
        one_token = {**sampling, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": ASKS_FOR_TRANSFER}
        call = pb_utils.InferenceRequest(
            model_name=self.prefill_model,
            inputs=[*prompt, *flags, text("sampling_parameters", json.dumps(one_token))],
            requested_output_names=["kv_transfer_params"],
        )
        found = None
        async for response in await call.async_exec(decoupled=True):
            if response.has_error():
                return None, response.error()
            for tensor in response.output_tensors():
                found = json.loads(tensor.as_numpy()[0])
        if not found:
            return None, pb_utils.TritonError(
                f"model '{self.prefill_model}' gave no kv_transfer_params, expected an object: configure a KV connector"
            )
        return found, None

    async def decode(self, inputs, sampling, transfer, outputs, sender):
        """Send on what the second half gives. Returns its error, None without one, and whether something was sent."""
        began = False
        async for response in await self.second(inputs.values(), sampling, transfer, outputs):
            if response.has_error():
                return response.error(), began
            if response.output_tensors():
                sender.send(pb_utils.InferenceResponse(response.output_tensors()))
                began = True
        return None, began

    async def release(self, inputs, sampling, transfer):
        """Free what the first half still holds: connectors do it once a second half has taken it."""
        prompt = [inputs[name] for name in ("text_input", "prompt_token_ids", "image") if name in inputs]
        one_token = {**sampling, "max_tokens": 1, "min_tokens": 0}
        async for _ in await self.second(prompt, one_token, transfer, ["text_output"]):
            pass

    async def second(self, tensors, sampling, transfer, outputs):
        sampling = json.dumps({**sampling, "kv_transfer_params": transfer})
        call = pb_utils.InferenceRequest(
            model_name=self.decode_model,
            inputs=[*tensors, text("sampling_parameters", sampling)],
            requested_output_names=list(outputs),
        )
        return await call.async_exec(decoupled=True)


def flag(name, value):
    return pb_utils.Tensor(name, np.array([value]))


def text(name, value):
    return pb_utils.Tensor(name, np.array([value.encode()], np.object_))
