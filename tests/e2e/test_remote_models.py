"""Models from an S3 server beside models of this machine, on two executors, as they come, change and go (R7)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import object_stores
import pytest
from controlled_models import factor
from e2e_asking import statistics, until
from e2e_models import SCALING_IO, scaling, scaling_graph
from e2e_server import serving
from tritonclient.utils import InferenceServerException

CONFIG = f'backend: "onnxruntime"\nmax_batch_size: 8\n{SCALING_IO}\nversion_policy {{ all {{}} }}'


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server that polls a bucket and a directory."""
    if why := object_stores.missing("s3"):
        pytest.skip(why)
    directory = tmp_path_factory.mktemp("remote")
    scaling(directory / "models", "local", 1)
    mount = directory / "mount"
    with object_stores.s3_bucket() as bucket, pytest.MonkeyPatch.context() as patch:
        for name, value in {**bucket.environment, "TRITON_AWS_MOUNT_DIRECTORY": str(mount)}.items():
            patch.setenv(name, value)
        bucket.put("prod/first/config.pbtxt", CONFIG)
        bucket.put("prod/first/1/model.onnx", scaling_graph(2))
        with serving(
            directory / "models",
            directory / "state",
            f"--model-repository={bucket.url('prod')}",
            "--model-control-mode=poll",
            "--repository-poll-secs=0.2",
            "--executors=2",
        ) as server:
            yield SimpleNamespace(server=server, bucket=bucket, mount=mount)


def test_models_of_a_bucket_come_change_and_go(remote: Any) -> None:
    server, bucket = remote.server, remote.bucket

    def serves(name: str, wanted: float, version: str = "") -> bool:
        try:
            return factor(server, name, version=version) == wanted
        except InferenceServerException:
            return False

    assert (factor(server, "first"), factor(server, "local", "grpc")) == (2, 1)
    assert factor(server, "first", version="1") == 2
    before = statistics(server, "first")["inference_count"]
    bucket.put("prod/first/2/model.onnx", scaling_graph(3))
    until("the new version is served", lambda: serves("first", 3))
    assert factor(server, "first", version="1") == 2
    assert statistics(server, "first")["inference_count"] > before, "version 1 was left alone (R10)"
    bucket.put("prod/first/1/model.onnx", scaling_graph(4))
    until("the changed version is served", lambda: serves("first", 4, "1"))
    bucket.put("prod/second/config.pbtxt", CONFIG)
    bucket.put("prod/second/1/model.onnx", scaling_graph(5))
    until("a new model is served", lambda: serves("second", 5))
    for name in ("config.pbtxt", "1/model.onnx", "2/model.onnx"):
        bucket.delete(f"prod/first/{name}")
    until("a removed model is gone", lambda: server.get("/v2/models/first/ready")[0] != 200)
    assert factor(server, "local") == 1
    # each executor has files of its own, and none of what is served no longer
    until("copies", lambda: sorted(copy.name for copy in remote.mount.glob("*/*/*")) == ["second", "second"])
    assert len({path.parents[1] for path in remote.mount.glob("*/*/second")}) == 2


def test_a_store_that_does_not_answer_delays_no_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in object_stores.S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    stalls, asked, over = threading.Event(), threading.Event(), threading.Event()

    class Stalling(BaseHTTPRequestHandler):
        """Lists nothing, until it answers no more."""

        def do_GET(self) -> None:
            if stalls.is_set():
                asked.set()
                over.wait()
                return
            body = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    scaling(tmp_path / "models", "local", 1)
    with ThreadingHTTPServer(("127.0.0.1", 0), Stalling) as store:
        threading.Thread(target=store.serve_forever, daemon=True).start()
        poll = ("--model-control-mode=poll", "--repository-poll-secs=0.2")
        url = f"--model-repository=s3://127.0.0.1:{store.server_address[1]}/bucket"
        try:
            with serving(tmp_path / "models", tmp_path / "state", url, *poll) as server:
                stalls.set()
                assert asked.wait(60)
                assert factor(server, "local") == 1
                began = time.monotonic()
                assert server.stop() == 0
                assert time.monotonic() - began < 20, "the store has 30 s to answer"
        finally:
            over.set()
            store.shutdown()


def test_a_bucket_that_cannot_be_read_is_one_sentence(remote: Any, tmp_path: Path) -> None:
    url = remote.bucket.url("prod", "nobodys")
    ended = subprocess.run(
        [
            str(Path(sys.executable).parent / "charonia"),
            "serve",
            f"--model-repository={url}",
            "--http-port=0",
            "--grpc-port=0",
            "--metrics-port=0",
            f"--state-dir={tmp_path}",
            "--log-info=false",
        ],
        capture_output=True,
        text=True,
        timeout=180,
        env=dict(os.environ),
        check=False,
    )
    assert ended.returncode == 1
    why = r"http://[\d.:]+ has no bucket 'nobodys'; check the URL"
    assert re.fullmatch(f"charonia: the model repository '{url}' cannot be read: {why}\n", ended.stderr)
