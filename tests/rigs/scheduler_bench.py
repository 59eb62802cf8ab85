"""A scheduler on a clock of the test's own, with what it decides put into words."""

from __future__ import annotations

from batcher.scheduling.decisions import (
    BurstWave,
    CondemnRequest,
    Decision,
    DispatchBatch,
    JoinEntries,
    RejectRequest,
    ReleaseReplies,
    StopExecution,
)
from batcher.scheduling.observations import (
    WAVE_BIT,
    BatchFinished,
    BatchReturned,
    ExecutorLost,
    Observation,
    PolicyChanged,
    RequestQueued,
    VersionServed,
)
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching, QueuePolicy, TimeoutAction

US = 1000
HUGE = 2**64 - 1
DELAY = TimeoutAction.DELAY


def interface(max_batch_size: int, block: DynamicBatching | None) -> ModelInterface:
    return ModelInterface(
        name="m",
        backend="",
        platform="",
        max_batch_size=max_batch_size,
        inputs={},
        outputs={},
        dynamic_batching=block,
    )


class Model:
    """A scheduler, a clock, and decisions in words: "a: 1 2" is a batch of requests 1 and 2 for executor a."""

    def __init__(
        self,
        block: DynamicBatching | None = None,
        *,
        max_batch_size: int = 4,
        slots: int = 1,
        prefetch: int = 0,
    ) -> None:
        self.scheduler = ModelScheduler("p", prefetch)
        self.now_ns = 0
        self.batches: dict[int, DispatchBatch] = {}
        self.see(PolicyChanged(interface(max_batch_size, block)))
        if slots:
            self.see(VersionServed("a", 1, "h1", slots))

    def see(self, *events: Observation) -> list[str]:
        return self.words(self.scheduler.observe_all(events, self.now_ns))

    def lose(self, executor: str, *events: Observation) -> list[str]:
        """An executor is lost a second later than whatever was before."""
        self.now_ns += 1_000_000_000
        return self.see(ExecutorLost(executor), *events)

    def at(self, us: int) -> list[str]:
        self.now_ns = us * US
        return self.words(self.scheduler.advance(self.now_ns))

    def put(self, *numbers: int, **fields: int) -> list[str]:
        return self.see(*[self.request(number, **fields) for number in numbers])

    def request(
        self,
        number: int,
        *,
        version: int = 1,
        level: int = 0,
        rows: int = 1,
        signature: int = 7,
        timeout_us: int = 0,
        deadline_us: int = 0,
        attempt: int = 0,
    ) -> RequestQueued:
        return RequestQueued(
            ident(number), version, level, rows, signature, timeout_us, deadline_us * US, self.now_ns, attempt, number
        )

    def wave(self, number: int, count: int = 1, *, signature: int = 7) -> RequestQueued:
        """A wave of requests of one row."""
        return RequestQueued(
            *(ident(number), 1, 0, count, signature ^ WAVE_BIT, 0, 0, self.now_ns, 0, number), count=count, wave=True
        )

    def finish(self, number: int, *, held: bool = False) -> list[str]:
        """The batch that request `number` was last in finished."""
        batch = self.batches[number]
        return self.see(BatchFinished(batch.batch_id, batch.executor, held))

    def give_back(self, number: int) -> list[str]:
        batch = self.batches[number]
        return self.see(BatchReturned(batch.batch_id, batch.executor))

    def wakeup_us(self) -> float | None:
        wakeup_ns = self.scheduler.next_wakeup()
        return None if wakeup_ns is None else wakeup_ns / US

    def words(self, decisions: list[Decision]) -> list[str]:
        said = []
        for decision in decisions:
            match decision:
                case DispatchBatch():
                    numbers = [number_of(request) for request in decision.requests]
                    self.batches |= dict.fromkeys(numbers, decision)
                    said.append(f"{decision.executor}: {' '.join(map(str, numbers))}")
                case RejectRequest():
                    number = number_of(decision.request)
                    said.append(f"{number} {decision.code.name} {decision.reason} {decision.message}".strip())
                case CondemnRequest():
                    said.append(f"{number_of(decision.request)} condemned on {decision.executor}: {decision.message}")
                case StopExecution():
                    said.append(f"stop {number_of(decision.request)} on {decision.executor}")
                case JoinEntries():
                    said.append(f"join {number_of(decision.known)}")
                case BurstWave():
                    said.append(f"burst {number_of(decision.request)}")
                case ReleaseReplies():
                    batch = next(b for b in self.batches.values() if b.batch_id == decision.batch_id)
                    said.append(f"answer {' '.join(str(number_of(r)) for r in batch.requests)}")
        return said


def ident(number: int) -> bytes:
    return number.to_bytes(16, "little")


def number_of(request: RequestQueued) -> int:
    return int.from_bytes(request.id, "little")


def timing(action: TimeoutAction, *, override: bool = False, timeout_us: int = 10) -> DynamicBatching:
    return DynamicBatching(
        default_queue_policy=QueuePolicy(
            timeout_action=action, default_timeout_us=timeout_us, allow_timeout_override=override
        )
    )
