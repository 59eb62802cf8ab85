"""Ray Serve, one deployment per model with @serve.batch. Arguments: HTTP port, directory for Ray's files."""

import os
import signal
import sys
import time
from pathlib import Path

os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # for the workers that Ray starts
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import benched_models
import numpy as np
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(max_ongoing_requests=512, ray_actor_options={"num_cpus": 0.1})
class Peer:
    def __init__(self, name):
        self.name, self.run = name, benched_models.runner(name)
        self.batched.set_max_batch_size(benched_models.CASES[name]["max_batch"])

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.0005)
    async def batched(self, tensors):
        result = self.run(np.concatenate(tensors)) if len(tensors) > 1 else self.run(tensors[0])
        ends = np.cumsum([len(tensor) for tensor in tensors])
        return [result[end - len(tensor) : end] for tensor, end in zip(tensors, ends, strict=True)]

    async def __call__(self, request: Request):
        if request.headers.get("content-type") == "application/octet-stream":
            tensor = np.frombuffer(await request.body(), np.float32).reshape(benched_models.CASES[self.name]["shape"])
            return Response((await self.batched(tensor)).tobytes(), media_type="application/octet-stream")
        tensor = benched_models.decode(self.name, await request.json())
        return benched_models.encode(self.name, await self.batched(tensor))


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Ready:
    async def __call__(self, request: Request):
        return {}


def stop(*_):
    serve.shutdown()
    ray.shutdown()
    sys.exit(0)


signal.signal(signal.SIGTERM, stop)
# under less than 512 MiB of object store Ray warns and this much is never used here
ray.init(
    num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
    object_store_memory=256 << 20, _temp_dir=sys.argv[2],
)  # fmt: skip
quiet = {"enable_access_log": False}
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])}, logging_config=quiet)

for name in benched_models.CASES:
    serve.run(Peer.bind(name), name=name, route_prefix=f"/m/{name}", blocking=False, logging_config=quiet)
serve.run(Ready.bind(), name="ready", route_prefix="/ready", blocking=False, logging_config=quiet)
while True:
    time.sleep(3600)
