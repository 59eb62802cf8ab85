"""Our protobuf text describes exactly the published interface, and lives in one process with the public client."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys

import pytest
from google.protobuf import descriptor_pb2

PAIRS = [
    ("protos.grpc_service_pb2", "tritonclient.grpc.service_pb2", "grpc_service.proto"),
    ("protos.model_config_pb2", "tritonclient.grpc.model_config_pb2", "model_config.proto"),
]


def _described_by(module_name: str) -> descriptor_pb2.FileDescriptorProto:
    """The descriptor in the module's own source: the pool would hand both modules whichever was loaded first."""
    source = inspect.getsource(importlib.import_module(module_name))
    literals = [
        node.args[0].value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "AddSerializedFile"
        and isinstance(node.args[0], ast.Constant)
    ]
    assert len(literals) == 1
    return descriptor_pb2.FileDescriptorProto.FromString(literals[0])


@pytest.mark.parametrize(("ours", "published", "file_name"), PAIRS)
def test_descriptor_equals_the_public_clients(ours: str, published: str, file_name: str) -> None:
    assert _described_by(ours).name == file_name
    assert _described_by(ours) == _described_by(published)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["ours first", "client first"])
def test_both_load_in_one_process(order: tuple[int, int]) -> None:
    imports = ["import protos.grpc_service_pb2_grpc, protos.health", "import tritonclient.grpc"]
    program = "; ".join(
        [
            *(imports[i] for i in order),
            "from protos import grpc_service_pb2 as ours",
            "from tritonclient.grpc import service_pb2 as theirs",
            "sent = theirs.ModelInferRequest(model_name='m', raw_input_contents=[b'x']).SerializeToString()",
            "got = ours.ModelInferRequest.FromString(sent)",
            "print(got.model_name, got.raw_input_contents[0])",
        ]
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "m b'x'"
