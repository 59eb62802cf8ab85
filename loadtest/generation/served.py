"""Clients of a server's `generate_stream`: one connection and one thread each."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence

from loadtest.model import LoadTestError

from .loops import Run


def run(address: str, model: str, prompts: Sequence[str], tokens: int) -> Run:
    """All prompts at once, so many tokens each, greedily. Raises `LoadTestError` for an answer that is none."""
    firsts: list[float] = []
    gaps: list[float] = []
    failures: list[str] = []

    def read(prompt: str) -> None:
        sampling = json.dumps({"temperature": 0, "max_tokens": tokens, "ignore_eos": True})
        body = json.dumps({"text_input": prompt, "stream": True, "sampling_parameters": sampling})
        connection = http.client.HTTPConnection(address, timeout=300)
        began, last = time.perf_counter(), 0.0
        connection.request("POST", f"/v2/models/{model}/generate_stream", body)
        for line in connection.getresponse():
            if not line.startswith(b"data:"):
                continue
            if b'"error"' in line:
                failures.append(line.decode())
                return
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            else:
                firsts.append(now - began)
            last = now
        connection.close()

    threads = [threading.Thread(target=read, args=(prompt,)) for prompt in prompts]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures or len(firsts) != len(prompts):
        raise LoadTestError(f"{len(prompts) - len(firsts)} of {len(prompts)} streams failed: {failures[:1]}")
    return Run(len(prompts) * tokens / (time.perf_counter() - began), firsts, gaps)
