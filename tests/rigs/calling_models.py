"""Models that call others, load them and hold what they need, for the tests of models that call models."""

from __future__ import annotations

WORKER = '''
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """X -> Y = 2 X. Parameters: `fail` a text to fail with, `entered`, `gate` as files, `cancelled` made when it is."""

    def execute(self, requests):
        return [self.one(request, json.loads(request.parameters())) for request in requests]

    def one(self, request, parameters):
        if "fail" in parameters:
            error = pb_utils.TritonError(parameters["fail"], pb_utils.TritonError.NOT_FOUND)
            return pb_utils.InferenceResponse(error=error)
        if "entered" in parameters:
            open(parameters["entered"], "w").close()
        while "gate" in parameters and not os.path.exists(parameters["gate"]):
            if request.is_cancelled():
                open(parameters["cancelled"], "w").close()
                break
            time.sleep(0.002)
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", 2 * x)], parameters={"id": request.request_id()})
'''

CALLER = '''
import json, os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils


class Failed(Exception):
    pass


class TritonPythonModel:
    """X -> Y, SAID. Parameter `do` says how; `model` is called, with the parameters in `with`."""

    def initialize(self, args):
        self.name = args["model_name"]
        self.early = ""
        request = self.request("worker", np.ones(1, np.float32))
        for early in (request.exec, lambda: pb_utils.load_model(self.name)):
            try:
                early()
            except pb_utils.TritonModelException as error:
                self.early += str(error)

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            parameters = json.loads(request.parameters())
            try:
                y, said = getattr(self, parameters["do"])(x, parameters)
            except pb_utils.TritonModelException as error:
                y, said = x, ["raised", str(error)]
            except Failed as failure:
                responses.append(pb_utils.InferenceResponse(error=failure.args[0]))
                continue
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("Y", y), pb_utils.Tensor("SAID", np.array([str(s) for s in said], dtype=object)),
            ]))
        return responses

    def request(self, model, x, parameters=None, **more):
        return pb_utils.InferenceRequest(**({
            "model_name": model, "requested_output_names": ["Y"], "inputs": [pb_utils.Tensor("X", x)],
            "parameters": parameters or {},
        } | more))

    def said(self, x, response):
        if response.has_error():
            return x, ["error", response.error().code(), response.error().message()]
        return pb_utils.get_output_tensor_by_name(response, "Y").as_numpy(), [response.parameters()]

    def call(self, x, parameters):
        more, words = json.loads(parameters.get("more", "{}")), json.loads(parameters.get("with", "{}"))
        return self.said(x, self.request(parameters["model"], x, words, **more).exec())

    def threads(self, x, parameters):
        found = [None] * 8

        def one(n):
            found[n] = self.said(x, self.request("worker", x + n).exec())[0]

        running = [threading.Thread(target=one, args=(n,)) for n in range(8)]
        [thread.start() for thread in running]
        [thread.join() for thread in running]
        return np.concatenate(found), []

    def relay(self, x, parameters):
        path = [name for name in parameters["path"].split(",") if name]
        if not path:
            return x + 1, []
        rest = {"do": "relay", "path": ",".join(path[1:])}
        response = self.request(path[0], x, rest).exec()
        if response.has_error():
            raise Failed(response.error())
        return self.said(x, response)[0] + 1, []

    def onnx(self, x, parameters):
        response = pb_utils.InferenceRequest(
            model_name="scale", model_version=1, requested_output_names=["OUTPUT0"], request_id="from a model",
            inputs=[pb_utils.Tensor("INPUT0", x.reshape(1, -1))],
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU),
        ).exec()
        return pb_utils.get_output_tensor_by_name(response, "OUTPUT0").as_numpy().ravel(), []

    def scored(self, x, parameters):
        request = pb_utils.InferenceRequest(
            model_name="scored", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x)]
        )
        found = [request.exec(), *request.exec(decoupled=True)]
        return x, [one.error().message() if one.has_error() else json.loads(one.parameters())["score"] for one in found]

    def one_by_one(self, x, parameters):
        responses = list(self.request("worker", x).exec(decoupled=True))
        return self.said(x, responses[0])[0], [len(responses)]

    def all_of(self, x, parameters):
        """Every response of `several`, cancelled after the first few, read twice."""
        responses = self.request("several", x, parameters).exec(decoupled=True)
        found = []
        for response in responses:
            if response.has_error():
                return x, ["error", response.error().code(), response.error().message(), len(found)]
            if response.output_tensors():
                found.append(pb_utils.get_output_tensor_by_name(response, "Y").as_numpy())
            if len(found) == int(parameters.get("enough", "1000")):
                responses.cancel()
        again = [pb_utils.get_output_tensor_by_name(one, "Y").as_numpy() for one in responses if one.output_tensors()]
        return np.concatenate(again), [len(found)]

    def cancel_one(self, x, parameters):
        """`worker`, cancelled while it runs."""
        responses = self.request("worker", x, parameters).exec(decoupled=True)
        while not os.path.exists(parameters["entered"]):
            time.sleep(0.002)
        responses.cancel()
        (response,) = responses
        return self.said(x, response)

    def steps(self, x, parameters):
        """A sequence of three, and one that goes on where none was begun."""
        flags = [pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, 0, pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END]
        steps = [self.request("counting", x, correlation_id=parameters["id"], flags=flag).exec() for flag in flags]
        after = self.request("counting", x, correlation_id=parameters["id"]).exec()
        return np.concatenate([self.said(x, step)[0] for step in steps]), self.said(x, after)[1]

    def meet(self, x, parameters):
        """Begin another sequence of this model once two have come so far."""
        open(os.path.join(parameters["dir"], parameters["callee"]), "w").close()
        while len(os.listdir(parameters["dir"])) < 2:
            time.sleep(0.002)
        words = {"do": "relay", "path": ""}
        return self.said(x, self.request(self.name, x, words, correlation_id=int(parameters["callee"]), flags=3).exec())

    def early_words(self, x, parameters):
        return x, [self.early]

    def ready(self, x, parameters):
        asked = [("worker",), ("worker", "1"), ("worker", "7"), ("nobody",)]
        return x, [pb_utils.is_model_ready(*words) for words in asked]

    def load(self, x, parameters):
        pb_utils.load_model("spare", config=parameters.get("config", ""))
        before = pb_utils.is_model_ready("spare")
        y, _ = self.said(x, self.request("spare", x).exec())
        pb_utils.unload_model("spare")
        return y, [before]

    def load_wrongly(self, x, parameters):
        said = []
        for call in (
            lambda: pb_utils.load_model("spare", config={"max_batch_size": 4}),
            lambda: pb_utils.load_model(None),
            lambda: pb_utils.unload_model(5),
            lambda: pb_utils.is_model_ready("spare", 1),
        ):
            try:
                call()
            except TypeError as error:
                said.append(error)
        return x, said

    def load_unknown(self, x, parameters):
        pb_utils.load_model("nobody")
'''

ASYNC = '''
import asyncio, json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """X -> Y: what `worker` makes of X, X + 1, ... X + 8, the first ones asked for at once."""

    async def execute(self, requests):
        return await asyncio.gather(*(self.one(request) for request in requests))

    async def one(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()

        def asked(n):
            return pb_utils.InferenceRequest(
                model_name="worker", requested_output_names=["Y"], inputs=[pb_utils.Tensor("X", x + n)],
                trace=request.trace(),
            )

        first = asked(0).async_exec()
        responses = [await first, *await asyncio.gather(*(asked(n).async_exec() for n in range(1, 7)))]
        responses += [response async for response in await asked(7).async_exec(decoupled=True)]
        responses += list(await asked(8).async_exec(decoupled=True))
        y = np.concatenate([pb_utils.get_output_tensor_by_name(r, "Y").as_numpy() for r in responses])
        said = pb_utils.Tensor("SAID", np.array([], dtype=object))
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y), said])
'''

SEVERAL = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            parameters = json.loads(request.parameters())
            after, sign = int(parameters.get("after", "0")), 1
            for n in range(int(parameters["count"])):
                if request.is_cancelled():
                    if not after:
                        break
                    after, sign = after - 1, -1
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", sign * (x + n))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

COUNTING = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy().ravel()[0]
            self.count = 1 if start else self.count + 1
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x + np.float32(self.count))]))
        return responses
"""

COUNTING_CONFIG = """
sequence_batching {
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
}
"""

ENSEMBLE = """
platform: "ensemble"
input { name: "X" data_type: TYPE_FP32 dims: -1 }
output { name: "Y" data_type: TYPE_FP32 dims: -1 }
ensemble_scheduling {
  step { model_name: "worker" input_map { key: "X" value: "X" } output_map { key: "Y" value: "twice" } }
  step { model_name: "caller" input_map { key: "X" value: "twice" } output_map { key: "Y" value: "Y" } }
}
"""

WORKER_IO = """
input { name: "X" data_type: TYPE_FP32 dims: -1 }
output { name: "Y" data_type: TYPE_FP32 dims: -1 }
"""
CALLER_IO = WORKER_IO + 'output { name: "SAID" data_type: TYPE_STRING dims: -1 }'


def instances(count: int) -> str:
    return f"instance_group {{ count: {count} kind: KIND_CPU }}"
