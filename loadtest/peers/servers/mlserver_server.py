"""Writes an MLServer repository into the working directory and becomes MLServer, with one inference worker process.

Arguments: HTTP port, gRPC port, metrics port.
"""

import json
import os
import sys
from pathlib import Path

import benched_models

http, grpc, metrics = map(int, sys.argv[1:4])
os.environ["PYTHONPATH"] = str(Path(__file__).parent)
settings = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics, "parallel_workers": 1, "debug": False}
settings |= {"host": "127.0.0.1", "grpc_max_message_length": 64 << 20}
Path("settings.json").write_text(json.dumps(settings))
for name, case in benched_models.CASES.items():
    model = {"name": name, "implementation": "mlserver_model.Peer", "max_batch_time": 0.0005}
    Path(name).mkdir(exist_ok=True)
    Path(name, "model-settings.json").write_text(json.dumps({**model, "max_batch_size": case["max_batch"]}))
os.execv(str(Path(sys.executable).with_name("mlserver")), ["mlserver", "start", os.getcwd()])
