"""LitServe, one API per model on one server. Arguments: HTTP port."""

import sys

import benched_models
import litserve
import numpy as np


class Peer(litserve.LitAPI):
    def __init__(self, name, **options):
        super().__init__(api_path=f"/m/{name}", **options)
        self.model = name

    def setup(self, device):
        self.run = benched_models.runner(self.model)

    def decode_request(self, request):
        return benched_models.decode(self.model, request)[0]

    def batch(self, inputs):
        return np.stack(inputs)

    def predict(self, x):
        return self.run(x)

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        return benched_models.encode(self.model, output[None])


if __name__ == "__main__":
    apis = [Peer(n, max_batch_size=case["max_batch"], batch_timeout=0.0005) for n, case in benched_models.CASES.items()]
    options = {"generate_client_file": False, "log_level": "warning", "num_api_servers": 1}
    litserve.LitServer(apis, accelerator="cpu").run(port=int(sys.argv[1]), host="127.0.0.1", **options)
