"""Bodies as examples, from the example models `identity` and `magika`. A test checks each against its schema. Pure."""

from __future__ import annotations

from typing import Any

from google.protobuf import text_format

from charonia.models.config_forms import to_json
from protos.model_config_pb2 import ModelConfig

_NUMBERS = [float(number) for number in range(16)]

JOB_ID = "842df4ddb7153e2c5a62da959f458113.identity"
_LOCATION = f"/v2/jobs/{JOB_ID}"

SERVER = {"name": "triton", "version": "2.73.0", "extensions": ["classification", "sequence", "model_repository"]}
MODEL = {
    "name": "identity",
    "versions": ["1"],
    "platform": "onnxruntime_onnx",
    "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 16]}],
    "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 16]}],
}
CONFIG = to_json(
    text_format.Parse(
        'name: "identity" platform: "onnxruntime_onnx" backend: "onnxruntime" max_batch_size: 64 '
        'input { name: "INPUT0" data_type: TYPE_FP32 dims: 16 } '
        'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 } dynamic_batching {}',
        ModelConfig(),
    )
)

_SPENT = {"count": 4, "ns": 909536}
_NONE = {"count": 0, "ns": 0}
STATISTICS = {
    "model_stats": [
        {
            "name": "identity",
            "version": "1",
            "last_inference": 1795364921977,
            "inference_count": 4,
            "execution_count": 4,
            "inference_stats": {
                "success": _SPENT,
                "fail": _NONE,
                "queue": _SPENT,
                "compute_input": _SPENT,
                "compute_infer": _SPENT,
                "compute_output": _SPENT,
                "cache_hit": _NONE,
                "cache_miss": _NONE,
            },
            "response_stats": {},
            "batch_stats": [
                {"batch_size": 1, "compute_input": _SPENT, "compute_infer": _SPENT, "compute_output": _SPENT}
            ],
            "memory_usage": [],
        }
    ]
}

_INPUT = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 16]}
INFER = {"id": "1", "inputs": [{**_INPUT, "data": _NUMBERS}], "outputs": [{"name": "OUTPUT0"}]}
INFER_BINARY = (
    '{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,16],"parameters":{"binary_data_size":64}}]}'
    "<64 bytes of little-endian numbers>"
)
_OUTPUT = {"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 16]}
INFERRED = {
    "id": "1",
    "model_name": "identity",
    "model_version": "1",
    "outputs": [{**_OUTPUT, "data": _NUMBERS}],
}
INFERRED_BINARY = (
    '{"model_name":"identity","model_version":"1","outputs":[{"name":"OUTPUT0","datatype":"FP32","shape":[1,16],'
    '"parameters":{"binary_data_size":64}}]}<64 bytes of little-endian numbers>'
)
GENERATE = {"INPUT0": _NUMBERS}
GENERATED = {"OUTPUT0": _NUMBERS, "model_name": "identity", "model_version": "1"}
GENERATE_EVENT = {"data": '{"OUTPUT0":[0.0,1.0,2.0],"model_name":"identity","model_version":"1"}'}

ACCEPTED = {
    "id": JOB_ID,
    "state": "queued",
    "location": _LOCATION,
    "durability": "memory",
    "position": 1,
    "queue_length": 1,
    "eta_s": 0.000574,
}
_SUMMARY: dict[str, Any] = {
    "id": JOB_ID,
    "state": "succeeded",
    "location": _LOCATION,
    "model_name": "identity",
    "model_version": "1",
    "request_id": "1",
    "attempts": 1,
    "timings": {"accepted_us": 1795364921618854, "ended_us": 1795364921622098},
    "durability": "memory",
    "tenant": "",
    "has_result": True,
    "expires_us": 1795451321622098,
}
PAGE = {"jobs": [_SUMMARY], "next": None}
JOB = {
    **_SUMMARY,
    "timings": {
        "accepted_us": 1795364921618854,
        "ended_us": 1795364921622098,
        "batched_us": 1795364921619722,
        "queue_s": 0.000868,
        "execute_s": 0.002376,
    },
    "position": 0,
    "queue_length": 0,
    "eta_s": None,
    "wait_reason": "",
    "error": "",
}
WAITING = {
    **JOB,
    "state": "queued",
    "model_version": "",
    "attempts": 0,
    "timings": {
        "accepted_us": 1795364921618854,
        "ended_us": None,
        "batched_us": None,
        "queue_s": None,
        "execute_s": None,
    },
    "has_result": False,
    "expires_us": None,
    "position": 3,
    "queue_length": 7,
    "eta_s": 0.25,
    "wait_reason": "2 requests are served before it",
}
TIMELINE = {
    **JOB,
    "events": [{"number": 1, "event": "accepted", "time_us": 1795364921618854, "after_s": 0.0, "detail": {}}],
}
JOB_EVENT = {
    "id": "1",
    "event": "accepted",
    "data": '{"number":1,"time_us":1795364921618854,"detail":{}}',
}

INDEX = [{"name": "identity", "version": "1", "state": "READY"}, {"name": "magika"}]
LOAD = {"parameters": {"config": '{"name":"identity","backend":"onnxruntime","max_batch_size":8}'}}
ROUTE_RULE = {
    "present": 2,
    "candidate": 3,
    "share": 10.0,
    "headers": {"x-canary": "yes"},
    "tenants": [],
    "sticky": "",
    "shadow": 0,
    "tolerances": {},
    "gate": {
        "rollback": True,
        "window_s": 60.0,
        "min_requests": 50,
        "max_error_percent": 1.0,
        "max_latency_ratio": 1.5,
        "latency_slack_ms": 5.0,
        "steps": [25.0, 50.0, 100.0],
    },
    "stage": "canary",
    "history": [
        {"at_us": 1795364921618854, "by": "operator", "what": "version 3 gets 10%", "reason": "asked for"},
    ],
}
ROUTE = {"model": "resnet", "rule": ROUTE_RULE}
NO_ROUTE = {"model": "resnet", "rule": None}
TRACE = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
LOGGING = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}
SYSTEM_REGION = {"key": "/input_data", "offset": 0, "byte_size": 64}
SYSTEM_REGIONS = [{"name": "input", **SYSTEM_REGION}]
CUDA_REGION = {"raw_handle": {"b64": "<base64 of cudaIpcMemHandle_t>"}, "device_id": 0, "byte_size": 64}
CUDA_REGIONS = [{"name": "input", "device_id": 0, "byte_size": 64}]
