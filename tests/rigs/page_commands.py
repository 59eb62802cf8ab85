"""Runs the commands of a page and compares what they print with what the page shows.

A block of a page is executed when the line before its fence is `<!-- executed -->`, or `<!-- executed, other numbers
-->` where what it prints is measured. In a `console` block each `$ ` begins a command, which goes on in lines behind
six spaces, and the lines below are its output; commands of a page share a folder, which has the files that the page
shows, exported variables and aliases. A `python` block runs with the names of those before it, and a plain block
right behind it is its output. Pages speak of the usual ports, which are replaced by those of the server at hand. A
command may leave a process behind (`&`) that writes elsewhere; it has ended when the page has.

Shown and printed text match if they are equal but for white space, with these liberties: `...` stands for anything;
an id of 32 hex digits stands for another one, everywhere for the same; a number with a decimal point for one within 2
%; times and places in a queue (`_us`, `_s`, `position`, `queue_length`) for any. In a block with other numbers, each
number stands for any, and each duration for one in any unit.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"<!-- executed(, other numbers)? -->")
_FENCE = re.compile(rf"^{MARK.pattern}\n```(\w*)\n(.*?)^```\n(?:\n```\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"^`([\w./-]+)`:\n\n```\w*\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
OF_FRAMEWORKS = ("docs/howto/catboost.md", "docs/howto/spacy.md")
"""Pages whose commands need the libraries that `make test-backends` installs; `tests/backends` follows them."""
OF_LANGUAGE_MODELS = ("docs/howto/tensorrt-llm.md",)
"""Pages whose commands ask a real language model; `tests/llm` follows them."""
_PROGRESS = re.compile(r"^charonia [a-z]+: \d+ of \d+ .*\n", re.MULTILINE)
_OF_THE_MOMENT = re.compile(r'("(?:\w+_(?:us|s)|position|queue_length)":)(?:null|[\d.]+)')
_TOKEN = re.compile(r"\.\.\.|[0-9a-f]{32}|\d+\.\d+|.", re.DOTALL)
_TOKEN_OF_OTHERS = re.compile(r"\.\.\.|[0-9a-f]{32}|[+-]?\d+(?:\.\d+)?|.", re.DOTALL)
_ANY_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:e-?\d+)?"
_DURATION = re.compile(r"\b\d+(?:\.\d+)? ?(?:us|ms|s)\b")
_GOES_ON = " " * 6
"""Begins a further line of a command."""
OF_THE_STACK = ("docs/stack.md", "docs/operating.md")
"""Pages whose commands need Docker Engine; `tests/stack` follows them."""
_COMMAND_WITHIN_S = 900
"""Of a command that hangs; `charonia tune` starts five servers, one after the other, and images are built."""
_CONSOLE = "localhost:8004"
_ENDS_WITHIN_S = 10.0
"""So long a process that a page left behind has after SIGTERM."""
_KILLED_WITHIN_S = 30.0


@dataclass(frozen=True)
class Block:
    """One executed block: its language, its text, and of python what the page shows below it."""

    kind: str
    text: str
    output: str
    other_numbers: bool = False

    def commands(self) -> list[tuple[str, str]]:
        """Each command of a console block with the output that the page shows."""
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)
        assert not parts[0].strip(), "a console block begins with a command"
        found = []
        for part in parts[1:]:
            command, _, output = part.partition("\n")
            while output.startswith(_GOES_ON):
                more, _, output = output.partition("\n")
                command += "\n" + more
            found.append((command, output))
        return found


def executed_blocks(text: str) -> list[Block]:
    """The marked blocks of a page. Raises AssertionError for a mark that no block follows."""
    found = [Block(kind, body, output, bool(others)) for others, kind, body, output in _FENCE.findall(text)]
    assert len(found) == len(MARK.findall(text)), "a mark stands before no block"
    assert {block.kind for block in found} <= {"console", "python"}
    return found


def files_of(text: str) -> dict[str, str]:
    """What a page says files contain, by their paths: blocks behind a line that has only a path and a colon."""
    return dict(_FILE.findall(text))


def write_files(text: str, folder: Path) -> None:
    """Writes the files that a page shows into a folder."""
    for name, content in files_of(text).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


class Ids:
    """Which printed id each shown one stands for."""

    def __init__(self) -> None:
        self.printed: dict[str, str] = {}

    def replaced(self, text: str) -> str:
        """A command of the page with the ids that its server gave."""
        for shown, printed in self.printed.items():
            text = text.replace(shown, printed)
        return text


def matches(shown: str, printed: str, ids: Ids, *, other_numbers: bool = False) -> bool:
    """Whether a page that shows one thing is right about another; learns ids. Lines of progress, which come once a
    second, count only where the page shows some.
    """
    if not _PROGRESS.search(shown):
        printed = _PROGRESS.sub("", printed)
    if other_numbers:  # 931ms where the page shows 1.1s
        shown, printed = (_DURATION.sub("1s", text) for text in (shown, printed))
    pattern, shown_numbers, shown_ids = "", [], []
    tokens = _TOKEN_OF_OTHERS if other_numbers else _TOKEN
    for token in tokens.findall(_OF_THE_MOMENT.sub(r"\1...", re.sub(r"\s+", "", shown))):
        if token == "...":
            pattern += ".*?"
        elif re.fullmatch(r"[0-9a-f]{32}", token):
            pattern += f"(?P<i{len(shown_ids)}>[0-9a-f]{{32}})"
            shown_ids.append(token)
        elif other_numbers and re.fullmatch(_ANY_NUMBER, token):
            pattern += _ANY_NUMBER
        elif re.fullmatch(r"\d+\.\d+", token):
            pattern += rf"(?P<n{len(shown_numbers)}>\d+(?:\.\d+)?(?:e-?\d+)?)"
            shown_numbers.append(float(token))
        else:
            pattern += re.escape(token)
    found = re.fullmatch(pattern, re.sub(r"\s+", "", printed), re.DOTALL)
    if found is None:
        return False
    near = all(
        math.isclose(value, float(found[f"n{at}"]), rel_tol=0.02, abs_tol=0.001)
        for at, value in enumerate(shown_numbers)
    )
    return near and all(
        ids.printed.setdefault(one, found[f"i{at}"]) == found[f"i{at}"] for at, one in enumerate(shown_ids)
    )


class Reader:
    """One who does what a page says, in a folder of his own that looks like the repository's root."""

    def __init__(self, folder: Path, *, places: Mapping[str, str], environment: Mapping[str, str]) -> None:
        """`places` are the addresses that pages name, host:port, with what stands for each of them here."""
        self._folder = folder
        self._places = dict(places)
        programs = Path(sys.executable).parent
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".venv").symlink_to(programs.parent)  # whole, as the interpreter looks for its settings there
        (folder / "examples").symlink_to(ROOT / "examples")
        self._environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **environment}

    @classmethod
    def of_server(cls, folder: Path, *, http: str, grpc: str, metrics: str, log_url: str) -> Reader:
        """`http`, `grpc` and `metrics` are the host:port of a running server, `log_url` is of its log."""
        return cls(
            folder,
            places={"localhost:8000": http, "localhost:8001": grpc, "localhost:8002": metrics},
            environment={"CHARONIA_URL": f"http://{http}", "CHARONIA_LOG_URL": log_url},
        )

    def follow(self, text: str) -> list[str]:
        """Writes the files that a page shows, and executes its marked blocks; returns what the page is wrong about."""
        write_files(text, self._folder)
        try:
            return self._follow(text)
        finally:
            self._end_what_is_left()

    def _end_what_is_left(self) -> None:
        """Ends the processes that commands left behind, and waits until they have ended."""
        self._signal(signal.SIGTERM, _ENDS_WITHIN_S)
        assert not self._signal(signal.SIGKILL, _KILLED_WITHIN_S), "killed processes are still there"

    def _signal(self, number: signal.Signals, within_s: float) -> int:
        """Sends a signal to the processes left behind; how many of them have not ended after so many seconds."""
        with contextlib.ExitStack() as stack:
            waiting = select.poll()
            left = set()
            for process in self._left_behind():
                stack.callback(os.close, process)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, number)
                waiting.register(process, select.POLLIN)
                left.add(process)
            until = time.monotonic() + within_s
            while left and (rest_s := until - time.monotonic()) > 0:
                for process, _ in waiting.poll(rest_s * 1000):
                    waiting.unregister(process)
                    left.remove(process)
            return len(left)

    def _left_behind(self) -> Iterator[int]:
        """A pidfd of each process whose working directory is the reader's folder; the caller closes it."""
        folder = self._folder.resolve()
        for place in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):  # of another user, or gone
                if place.readlink() != folder:
                    continue
                process = os.pidfd_open(int(place.parent.name))
                with contextlib.ExitStack() as closing:
                    closing.callback(os.close, process)
                    if place.readlink() == folder:  # no other process has its number now
                        closing.pop_all()
                        yield process

    def _choose_console_port(self) -> None:
        """Just before the commands that start a console: another process may take a free port at any time."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self._places[_CONSOLE] = f"127.0.0.1:{port}"
        self._environment["CHARONIA_CONSOLE_PORT"] = port

    def _follow(self, text: str) -> list[str]:
        ids, names, wrong = Ids(), dict[str, Any](), []
        for block in executed_blocks(text):
            if _CONSOLE in block.text and _CONSOLE not in self._places:
                self._choose_console_port()
            if block.kind == "python":
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(compile(self._placed(block.text), "page", "exec"), names)
                if not matches(block.output, printed.getvalue(), ids):
                    wrong.append(f"{block.text}\nthe page shows:\n{block.output}\nprinted:\n{printed.getvalue()}")
                continue
            wrong += self._console(block, ids)
        return wrong

    def _placed(self, text: str) -> str:
        for usual, actual in self._places.items():
            text = text.replace(usual, actual)
        return text

    def _console(self, block: Block, ids: Ids) -> list[str]:
        """A shell for each command, as an id in it may be known from the output before; aliases and exports stay."""
        wrong = []
        exported = self._folder / "exported"
        for command, shown in block.commands():
            line = self._placed(ids.replaced(command))
            client = re.search(r"examples/client\.py.*--protocol (\w+)", line)
            if client:
                url = self._places[{"http": "localhost:8000", "grpc": "localhost:8001"}[client[1]]]
                line = line.replace(client[0], f"{client[0]} --url {url}")
            before = f"shopt -s expand_aliases\n[ -f {exported} ] && . {exported}"
            script = f"{before}\n{line}\ncode=$?\nexport -p > {exported}\nalias -p >> {exported}\nexit $code"
            try:
                done = subprocess.run(
                    ["bash", "-c", script],
                    cwd=self._folder,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=_COMMAND_WITHIN_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                return [*wrong, f"$ {command}\ndid not end in {_COMMAND_WITHIN_S} s, and printed:\n{error.output}"]
            if done.returncode or not matches(shown, done.stdout, ids, other_numbers=block.other_numbers):
                wrong.append(f"$ {command} ({done.returncode})\nthe page shows:\n{shown}\nprinted:\n{done.stdout}")
        return wrong
