"""A decoupled model whose responses wait for files, one each, so that a test decides how far a stream has come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SOURCE = '''
import json, os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """COUNT -> so many VALUEs, each once there is a file `gates`.<index>, from a thread after execute returned.

    Parameters: `fail_at` an index that is an error, `bare_at` one without outputs, `flagged` the last response says
    that it is, `ends` a response with the final flag after all others ("bare" or "error"), `left` a file to make when
    the request was cancelled.
    """

    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            parameters = json.loads(request.parameters() or "{}")
            sender = request.get_response_sender()
            threading.Thread(target=self.send, args=(sender, count, parameters), daemon=True).start()
        return None

    def send(self, sender, count, parameters):
        gates = parameters.get("gates", "")
        for index in range(count):
            give_up_at = time.monotonic() + 60
            while gates and not os.path.exists(f"{gates}.{index}") and time.monotonic() < give_up_at:
                if sender.is_cancelled():
                    open(parameters["left"], "w").close()
                    sender.send(flags=FINAL)
                    return
                time.sleep(0.002)
            if index == int(parameters.get("fail_at", -1)):
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("An Error Occurred")))
                continue
            if index == int(parameters.get("bare_at", -1)):
                sender.send(pb_utils.InferenceResponse([]))
                continue
            tensor = pb_utils.Tensor("VALUE", np.array([index * index], np.int32))
            last = parameters.get("flagged") and index == count - 1
            sender.send(pb_utils.InferenceResponse([tensor]), flags=FINAL if last else 0)
        if parameters.get("ends") == "bare":
            sender.send(pb_utils.InferenceResponse([]), flags=FINAL)
        elif parameters.get("ends") == "error":
            sender.send(pb_utils.InferenceResponse([], error=pb_utils.TritonError("The End")), flags=FINAL)
        elif not parameters.get("flagged"):
            sender.send(flags=FINAL)
'''
CONFIG = """
max_batch_size: 0
model_transaction_policy { decoupled: true }
input { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "VALUE" data_type: TYPE_INT32 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""


class Gates:
    """Files a request waits for, one for each of its responses."""

    def __init__(self, path: Path) -> None:
        self.prefix = str(path / "gate")
        self.left = path / "left"

    def open(self, *indices: int) -> None:
        for index in indices:
            Path(f"{self.prefix}.{index}").touch()

    @property
    def parameters(self) -> dict[str, Any]:
        return {"gates": self.prefix, "left": str(self.left)}
