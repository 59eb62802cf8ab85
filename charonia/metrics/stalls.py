"""Reports every stall of a process's event loop with the stack that was running: `--debug-stalls`.

A beat of the loop measures how long the loop did not run. A thread samples the loop's stack meanwhile. A single call
into native code that keeps the interpreter's lock lets no thread run: then the sample is taken right after it, in the
frame that called it. Off by default; nothing here is on the path of a request.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
import traceback
from collections import Counter, deque
from dataclasses import dataclass
from types import FrameType

_log = logging.getLogger("charonia.stalls")

_MIN_POLL_S = 0.002
_MAX_FRAMES = 40
_IDLE_FILES = ("asyncio/runners.py", "asyncio/base_events.py", "selectors.py")
"""Where the loop's thread is while no callback runs."""


@dataclass(frozen=True, slots=True)
class Stall:
    """An interval in which the loop did not run.

    `on_processor_ms` is the processor time of the loop's thread in it, `in_threads_ms` that of the process's other
    threads, `in_collector_ms` that of Python's garbage collector. `stack` is the most frequent sample, the innermost
    call last; `others` are the other threads' positions at its end.
    """

    length_ms: int
    on_processor_ms: int
    in_threads_ms: int
    in_collector_ms: int
    stack: tuple[str, ...]
    others: tuple[str, ...]

    def text(self) -> str:
        """The log text, one line for each frame."""
        head = (
            f"the event loop stood still for {self.length_ms} ms ({self.on_processor_ms} ms of it on a processor, "
            f"{self.in_threads_ms} ms other threads, {self.in_collector_ms} ms collecting garbage) in"
        )
        own = self.stack or ("the loop itself: no callback was running",)
        return "\n".join([head, *(f"    {line}" for line in own), *(f"    beside: {line}" for line in self.others)])


class StallWatch:
    """Watches the running loop for stalls longer than `limit_ms`. Call `start` and `stop` in the loop's thread."""

    def __init__(self, limit_ms: int) -> None:
        self._limit_ns = limit_ms * 1_000_000
        self._poll_s = max(_MIN_POLL_S, limit_ms / 10_000)
        self._beat_s = limit_ms / 5_000
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._clock = 0
        self._beat_ns = self._cpu_ns = self._process_ns = 0
        self._collecting_ns = self._collected_ns = 0
        self._samples: deque[tuple[str, ...]] = deque(maxlen=2000)
        self._ended: deque[tuple[int, int, int, int]] = deque()
        """Length, processor time, that of other threads, and collector time of stalls that are not reported yet."""
        self._stopping = threading.Event()
        self._handle: asyncio.TimerHandle | None = None
        self.count = 0
        self.total_ns = 0
        self.longest_ns = 0
        self.recent: deque[Stall] = deque(maxlen=64)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread_id)
        gc.callbacks.append(self._on_collector)
        self._beat_ns = time.monotonic_ns()
        self._cpu_ns, self._process_ns = time.clock_gettime_ns(self._clock), time.process_time_ns()
        self._handle = self._loop.call_later(self._beat_s, self._beat)
        threading.Thread(target=self._watch, name="stall watch", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        if self._handle is not None:
            self._handle.cancel()
        if self._on_collector in gc.callbacks:
            gc.callbacks.remove(self._on_collector)

    def _on_collector(self, phase: str, _info: dict[str, int]) -> None:
        if threading.get_ident() != self._thread_id:
            return
        if phase == "start":
            self._collecting_ns = time.monotonic_ns()
        elif self._collecting_ns:
            self._collected_ns += time.monotonic_ns() - self._collecting_ns
            self._collecting_ns = 0

    def _beat(self) -> None:
        now_ns, cpu_ns, process_ns = time.monotonic_ns(), time.clock_gettime_ns(self._clock), time.process_time_ns()
        late_ns = now_ns - self._beat_ns - int(self._beat_s * 1e9)
        if late_ns > self._limit_ns:
            self.count += 1
            self.total_ns += late_ns
            self.longest_ns = max(self.longest_ns, late_ns)
            own_ns = cpu_ns - self._cpu_ns
            others_ns = max(0, process_ns - self._process_ns - own_ns)
            self._ended.append((late_ns, own_ns, others_ns, self._collected_ns))
        self._beat_ns, self._cpu_ns, self._process_ns, self._collected_ns = now_ns, cpu_ns, process_ns, 0
        assert self._loop is not None
        self._handle = self._loop.call_later(self._beat_s, self._beat)

    def _watch(self) -> None:
        suspicious_ns = int(self._beat_s * 1e9) + self._limit_ns // 4
        own_id = threading.get_ident()
        while not self._stopping.wait(self._poll_s):
            if time.monotonic_ns() - self._beat_ns > suspicious_ns:
                self._samples.append(stack_of(sys._current_frames().get(self._thread_id)))
                continue
            if self._ended:
                self._report(own_id)
            self._samples.clear()

    def _report(self, own_id: int) -> None:
        frames = sys._current_frames()
        others = tuple(
            stack[-1]
            for number, frame in frames.items()
            if number not in (own_id, self._thread_id) and (stack := stack_of(frame))
        )
        common = Counter(sample for sample in self._samples if sample).most_common(1)
        stack = common[0][0] if common else ()
        while self._ended:
            late_ms, own_ms, threads_ms, collected_ms = (time_ns // 1_000_000 for time_ns in self._ended.popleft())
            stall = Stall(late_ms, own_ms, threads_ms, collected_ms, stack, others)
            self.recent.append(stall)
            _log.warning("%s", stall.text())

    def render(self) -> bytes:
        """The families of this process in text exposition 0.0.4."""
        families = (
            ("charonia_event_loop_stalls", "Times this part's event loop stood still for long", f"{self.count}"),
            ("charonia_event_loop_stall_seconds", "Seconds of those times", f"{self.total_ns / 1e9:.3f}"),
        )
        return "".join(
            f"# HELP {name}_total {text}\n# TYPE {name}_total counter\n{name}_total {value}\n"
            for name, text, value in families
        ).encode()


def stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """The lines of a stack, outermost first; () while the loop only waits."""
    if frame is None or frame.f_code.co_filename.endswith(_IDLE_FILES):
        return ()
    lines = []
    for entry, line in traceback.walk_stack(frame):
        lines.append(f"{entry.f_code.co_filename}:{line} {entry.f_code.co_qualname}")
        if len(lines) >= _MAX_FRAMES:
            break
    return tuple(reversed(lines))


_watch: StallWatch | None = None


def watch_stalls(limit_ms: int) -> None:
    """Watch this process's running event loop from now on."""
    global _watch
    if _watch is None:
        _watch = StallWatch(limit_ms)
        _watch.start()


def render_stalls() -> bytes:
    """The stall metrics of this process; b"" while stalls are not watched."""
    return _watch.render() if _watch is not None else b""
