"""`loadtest.clients`: it runs what a checkout has, says what failed, and takes no empty report for a measurement."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.clients import analyzer, examples, perf
from loadtest.model import LoadTestError

ASKS = """
import argparse
import numpy as np
import tritonclient.http as http

parser = argparse.ArgumentParser()
parser.add_argument("-u", "--url")
with http.InferenceServerClient(parser.parse_args().url) as client:
    tensors = [http.InferInput(f"INPUT{at}", [1, 16], "INT32") for at in range(2)]
    for tensor in tensors:
        tensor.set_data_from_numpy(np.ones((1, 16), np.int32))
    answer = client.infer("MODEL", tensors).as_numpy("OUTPUT0")
assert (answer == 2).all()
"""


def test_each_example_is_run_and_judged_by_its_exit(tmp_path: Path) -> None:
    folder = tmp_path / examples.FOLDER
    folder.mkdir(parents=True)
    (folder / "simple_http_new_client.py").write_text(ASKS.replace("MODEL", "simple"))
    (folder / "simple_http_wrong_client.py").write_text(ASKS.replace("MODEL", "nowhere"))
    command = [sys.executable, "-m", "loadtest.clients", "examples", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    runs = {run["name"]: run for run in report["runs"]}
    assert runs["simple_http_new_client.py"]["state"] == "ok"
    assert runs["simple_http_wrong_client.py"]["state"] == "failed"
    assert "Request for unknown model: 'nowhere' is not found" in runs["simple_http_wrong_client.py"]["reason"]


def test_a_folder_without_examples_is_said(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="no examples in"):
        examples.found(tmp_path)


def test_a_report_without_requests_is_no_measurement(tmp_path: Path) -> None:
    report = tmp_path / perf.REPORT
    report.write_text("Concurrency,Inferences/Second\n1,120.5\n4,310\n")
    assert perf.measured(report) == "1: 120/s, 4: 310/s"
    report.write_text("Concurrency,Inferences/Second\n1,0\n")
    with pytest.raises(ValueError, match="rates"):
        perf.measured(report)
    export = tmp_path / perf.EXPORT
    export.write_text(json.dumps({"experiments": [{"requests": [{"response_timestamps": []}]}]}))
    with pytest.raises(ValueError, match="no response"):
        perf.exported(export)


def test_variants_that_answered_nothing_are_no_measurement(tmp_path: Path) -> None:
    report = tmp_path / analyzer.REPORT
    head = "Model,Model Config Path,Throughput (infer/sec)\n"
    report.write_text(f"{head}m,m_config_0,120.5\nm,m_config_0,300\nm,m_config_default,90\n")
    assert analyzer.measured(report, 2) == "m_config_0: 300/s, m_config_default: 90/s"
    with pytest.raises(ValueError, match="3 variants"):
        analyzer.measured(report, 3)
    report.write_text(f"{head}m,m_config_0,0\n")
    with pytest.raises(ValueError, match="rates"):
        analyzer.measured(report, 1)
