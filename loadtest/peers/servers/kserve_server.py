"""The KServe Python SDK's server; it does not batch. Arguments: HTTP port, gRPC port."""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

import benched_models
from kserve import InferOutput, InferResponse, Model, ModelServer


class Peer(Model):
    def __init__(self, name):
        super().__init__(name)
        self.run = benched_models.runner(name)
        self.slow = ThreadPoolExecutor(1) if name in ("resnet18", "ocr_rec") else None
        self.ready = True

    async def predict(self, payload, headers=None, response_headers=None):
        tensor = payload.inputs[0].as_numpy()
        if self.slow is None:
            result = self.run(tensor)
        else:
            result = await asyncio.get_running_loop().run_in_executor(self.slow, self.run, tensor)
        output = InferOutput(benched_models.CASES[self.name]["output"], list(result.shape), "FP32")
        output.set_data_from_numpy(result, binary_data=True)
        return InferResponse(payload.id or "", self.name, [output], use_binary_outputs=payload.use_binary_outputs)


if __name__ == "__main__":
    ports = {"http_port": int(sys.argv[1]), "grpc_port": int(sys.argv[2])}
    server = ModelServer(**ports, enable_latency_logging=False, access_log_format=None)
    server.start([Peer(name) for name in benched_models.CASES])
