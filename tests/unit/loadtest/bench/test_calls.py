"""A process with the hook counts its calls and tells them; idle work is taken out; files belong to packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from loadtest.bench import calls
from loadtest.model import LoadTestError

PROGRAM = """
import os, sys, threading
def inner(): pass
def outer():
    for _ in range(3):
        inner()
thread = threading.Thread(target=outer)
thread.start(); thread.join()
outer()
child = os.fork()
if child == 0:
    inner()
print(child, flush=True)
sys.stdin.readline()
if child:
    os.waitpid(child, 0)
"""


def test_calls_of_threads_and_forks_are_counted(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError):
        calls.read(tmp_path)
    environment = {**os.environ, **calls.environment(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    child = max(int(process.stdout.readline()) for _ in range(2))
    counts = calls.read(tmp_path)
    process.communicate(b"\n\n")
    assert set(counts) == {process.pid, child}
    own = {calls.function(name).name: count for name, count in counts[process.pid].items()}
    assert (own["inner"], own["outer"]) == (6, 2)
    assert {calls.function(name).name: count for name, count in counts[child].items()}["inner"] == 1


def test_idle_work_is_taken_out_function_by_function() -> None:
    background = calls.Background({7: {"a.py:1:beat": 10.0}})
    counts = {7: Counter({"a.py:1:beat": 25, "a.py:9:infer": 3}), 8: Counter({"a.py:1:beat": 4})}
    assert background.taken_from(counts, 2.0) == {7: {"a.py:1:beat": 5.0, "a.py:9:infer": 3}, 8: {"a.py:1:beat": 4.0}}
    assert background.taken_from(counts, 3.0)[7] == {"a.py:9:infer": 3}


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("/src/gateway/http/protocol.py", "gateway"),
        ("/home/charonia/gateway/http/protocol.py", "gateway"),
        ("/home/charonia/charonia/wire/waves.py", "charonia"),
        ("/env/lib/python3.11/site-packages/uvicorn/server.py", "uvicorn"),
        ("/env/lib/python3.11/site-packages/gateway/a.py", "gateway"),
        ("/usr/lib/python3.11/enum.py", "python"),
        ("<string>", "python"),
    ],
)
def test_package_of_a_file(file: str, package: str) -> None:
    assert calls.package_of(file, ("charonia", "gateway")) == package
