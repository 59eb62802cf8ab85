"""Models that call, stream and wait, for the tests of tracing."""

from __future__ import annotations

from e2e_models import WIDTH

ONE = "instance_group [ { count: 1 kind: KIND_CPU } ]"

CALLER = '''
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """X -> Y: what `chain` makes of X, asked for as part of the trace of X; TEXT: the trace as model code sees it."""

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            asked = dict(model_name="chain", requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", x)])
            inner = pb_utils.InferenceRequest(**asked, trace=request.trace()).exec()
            pb_utils.InferenceRequest(**asked).exec()  # without its trace: no part of it
            if inner.has_error():
                raise inner.error()
            y = pb_utils.get_output_tensor_by_name(inner, "OUT").as_numpy()
            text = np.array([[json.dumps(request.trace().get_context())]], dtype=object)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y), pb_utils.Tensor("TEXT", text)]))
        return responses
'''

CALLER_IO = f"""
max_batch_size: 8
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ {WIDTH} ] }}, {{ name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }} ]
"""

COUNTS = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """COUNT -> so many VALUEs."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in range(int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("VALUE", np.array([value], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''

COUNTS_IO = (
    'input [ { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] } ] '
    'output [ { name: "VALUE" data_type: TYPE_INT32 dims: [ 1 ] } ] '
    "model_transaction_policy { decoupled: true } "
)

WAITS = '''
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """GATE, a file to wait for -> OPEN; `GATE`.entered is made before."""

    def execute(self, requests):
        responses = []
        for request in requests:
            gate = pb_utils.get_input_tensor_by_name(request, "GATE").as_numpy()[0].decode()
            open(gate + ".entered", "w").close()
            while not os.path.exists(gate) and not request.is_cancelled():
                time.sleep(0.002)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OPEN", np.array([1], np.int32))]))
        return responses
'''

WAITS_IO = (
    'input [ { name: "GATE" data_type: TYPE_STRING dims: [ 1 ] } ] '
    'output [ { name: "OPEN" data_type: TYPE_INT32 dims: [ 1 ] } ] '
)

CHAIN = f"""
platform: "ensemble"
max_batch_size: 8
input [ {{ name: "IN" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
output [ {{ name: "OUT" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
ensemble_scheduling {{
  step [
    {{ model_name: "double" input_map {{ key: "INPUT0" value: "IN" }} output_map {{ key: "OUTPUT0" value: "twice" }} }},
    {{ model_name: "triple" input_map {{ key: "INPUT0" value: "twice" }} output_map {{ key: "OUTPUT0" value: "OUT" }} }}
  ]
}}
"""

OUTER = (
    CHAIN.replace('"double"', '"chain"')
    .replace('"INPUT0" value: "IN"', '"IN" value: "IN"')
    .replace('"OUTPUT0" value: "twice"', '"OUT" value: "twice"')
)
