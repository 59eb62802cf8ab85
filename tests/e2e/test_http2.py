"""HTTP/2 on the HTTP port of a whole server: inferences, a job's events, streamed responses, and the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from e2e_jobs import ASYNC, GATED, value_of
from e2e_models import WIDTH, gated, python, scaling

LIMIT_S = 90
COUNTING = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in range(int(request.inputs()[0].as_numpy()[0][0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[value]], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNTING_IO = """
max_batch_size: 8 model_transaction_policy { decoupled: true }
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""


async def test_all_of_it_on_one_connection(tmp_path: Path, serve: Any) -> None:
    models, gate = tmp_path / "models", tmp_path / "gate"
    scaling(models, "double", 2)
    python(models, "count", COUNTING, COUNTING_IO)
    gated(models, "gated", GATED)
    server = await asyncio.to_thread(serve, models)
    base, limits = f"http://{server.http}", httpx2.Limits(max_connections=1)
    async with httpx2.AsyncClient(http1=False, http2=True, base_url=base, limits=limits, timeout=LIMIT_S) as asking:
        receipt = await asking.post("/v2/models/gated/infer", content=value_of(1, {"gate": str(gate)}), headers=ASYNC)
        assert (receipt.status_code, receipt.http_version) == (202, "HTTP/2")
        location = receipt.headers["location"]
        async with asking.stream("GET", f"{location}/events") as events:
            lines = events.aiter_lines()
            assert await anext(_data(lines))  # the job's first event is here, and the stream goes on
            values = np.arange(WIDTH, dtype=np.float32)
            given = {"name": "INPUT0", "datatype": "FP32", "shape": [1, WIDTH], "data": values.tolist()}
            asked = [asking.post("/v2/models/double/infer", json={"inputs": [given]}) for _ in range(64)]
            for reply in await asyncio.gather(*asked):
                assert (reply.http_version, reply.status_code) == ("HTTP/2", 200)
                assert reply.json()["outputs"][0]["data"] == (2 * values).tolist()
            async with asking.stream("POST", "/v2/models/count/generate_stream", json={"INPUT0": 5}) as reply:
                assert [one["OUTPUT0"] async for one in _data(reply.aiter_lines())] == [0, 1, 2, 3, 4]
            gate.touch()
            assert [event async for event in _data(lines)]  # to the end
        result = await asking.get(f"{location}/result")
        assert result.status_code == 200
    assert await asyncio.to_thread(server.stop) == 0


async def _data(lines: AsyncIterator[str]) -> AsyncIterator[Any]:
    async for line in lines:
        if line.startswith("data: "):
            yield json.loads(line[6:])
