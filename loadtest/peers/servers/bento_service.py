"""The BentoML service: one batched API per model."""

import benched_models
import bentoml
import numpy as np


def api(name, case):
    """A batched API of one model, under its own route."""

    async def infer(self, reqs: list[dict]) -> list[dict]:
        tensors = [benched_models.decode(name, request) for request in reqs]
        result = self.runners[name](np.concatenate(tensors) if len(tensors) > 1 else tensors[0])
        return [benched_models.encode(name, row[None]) for row in result]

    infer.__name__ = name
    options = {"max_batch_size": case["max_batch"], "max_latency_ms": 60000, "route": f"/m/{name}"}
    return bentoml.api(batchable=True, **options)(infer)


class Peer:
    """All models, each behind its route."""

    def __init__(self):
        self.runners = {name: benched_models.runner(name) for name in benched_models.CASES}

    for _name, _case in benched_models.CASES.items():
        locals()[_name] = api(_name, _case)


Peer = bentoml.service(workers=1, traffic={"timeout": 60}, logging={"access": {"enabled": False}})(Peer)
