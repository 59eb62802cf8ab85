"""The console as a user opens it: behind the metrics port of `serve`, as a process of its own; loads and unloads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from e2e_asking import until


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def change(server: str, action: str) -> None:
    """Load or unload the model as the forms of its page do."""
    with urllib.request.urlopen(f"{server}/console/models/identity", timeout=60) as page:
        cookie = page.headers["set-cookie"].partition(";")[0]
        (token,) = set(re.findall(r'name="token" value="([0-9a-f]+)"', page.read().decode()))
    fields = {"token": token, "model": "identity", "back": "model", "confirmed": "yes"}
    headers = {"Cookie": cookie, "Origin": server}
    sent = urllib.request.Request(f"{server}/console/actions/{action}", urlencode(fields).encode(), headers)
    with urllib.request.urlopen(sent, timeout=120) as answer:  # the page that it is sent on to
        assert "/console/models/identity?notice=" in answer.url
        assert 'class="outcome"' in answer.read().decode()


def test_serve_and_a_process_of_its_own_show_the_same_server(
    example_models: Path, tmp_path: Path, serve: Callable[..., Any]
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "identity").symlink_to(example_models / "identity")
    server = serve(models, "--console-actions", "--model-control-mode=explicit", "--load-model=identity")
    assert not server.pids("console")
    page = read(f"http://{server.metrics}/console/")
    assert "<h1>Overview</h1>" in page
    # rates need two readings of the metrics, the first of which may be taken before the gateway has answered
    until("metrics", lambda: "answered, over the last 10 s" in read(f"http://{server.metrics}/console/"))
    (pid,) = server.pids("console")
    with urllib.request.urlopen(f"http://{server.metrics}/console/live?page=overview", timeout=60) as live:
        assert live.readline() == b"event: update\n"

    change(f"http://{server.metrics}", "unload")
    until("the model is unloaded", lambda: server.get("/v2/models/identity/ready")[0] != 200)
    change(f"http://{server.metrics}", "load")
    until("the model is loaded", lambda: server.get("/v2/models/identity/ready")[0] == 200)

    reader, writer = os.pipe()
    command = [sys.executable, "-m", "charonia.cli", "console", f"--state-dir={server.state_dir}", "--console-port=0"]
    with open(reader, "rb") as said, subprocess.Popen(command, stdout=writer) as console:
        os.close(writer)
        try:
            where = said.readline().decode().split()[-1]
            listed = read(f"{where}/models")
        finally:
            console.terminate()
        assert console.wait(180) == 0
    assert "/console/models/identity" in listed
    assert server.pids("console") == [pid]
