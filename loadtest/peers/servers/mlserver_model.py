"""The model class of the MLServer peer; see mlserver_server.py."""

import benched_models
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Peer(MLModel):
    async def load(self):
        self.run = benched_models.runner(self.name)
        return True

    async def predict(self, payload):
        result = self.run(NumpyCodec.decode_input(payload.inputs[0]))
        output = NumpyCodec.encode_output(benched_models.CASES[self.name]["output"], result)
        return InferenceResponse(model_name=self.name, outputs=[output])
