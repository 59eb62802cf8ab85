"""FastAPI and onnxruntime in one process, without batching. Arguments: HTTP port."""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

import benched_models
import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

RUNNERS = {name: benched_models.runner(name) for name in benched_models.CASES}
SLOW = ThreadPoolExecutor(1)
app = FastAPI()


class Tensor(BaseModel):
    name: str
    datatype: str
    shape: list[int]
    data: list[float]


class Inference(BaseModel):
    inputs: list[Tensor]


async def call(name, tensor):
    if name in ("resnet18", "ocr_rec"):
        return await asyncio.get_running_loop().run_in_executor(SLOW, RUNNERS[name], tensor)
    return RUNNERS[name](tensor)


@app.get("/ready")
async def ready():
    return {}


@app.post("/m/{name}")
async def infer(name: str, body: Inference):
    tensor = body.inputs[0]
    return benched_models.encode(name, await call(name, np.asarray(tensor.data, np.float32).reshape(tensor.shape)))


@app.post("/raw/{name}")
async def raw(name: str, request: Request):
    tensor = np.frombuffer(await request.body(), np.float32).reshape(benched_models.CASES[name]["shape"])
    return Response((await call(name, tensor)).tobytes(), media_type="application/octet-stream")


uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", loop="uvloop", http="httptools")
