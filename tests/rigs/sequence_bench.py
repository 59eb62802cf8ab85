"""A scheduler of sequences on a clock of the test's own, with what it decides put into words."""

from __future__ import annotations

from google.protobuf import text_format

from batcher.scheduling.decisions import Decision, DispatchBatch
from batcher.scheduling.observations import BatchFinished, Observation, PolicyChanged, RequestQueued, VersionServed
from batcher.scheduling.sequences.sequence_dispatch import Delays
from batcher.scheduling.sequences.sequence_scheduler import SequenceScheduler
from charonia.models.interface import ModelInterface
from charonia.wire import SequenceMark
from executors.configuration.config import normalise
from protos.model_config_pb2 import ModelConfig


def interface(block: str = "", rows: int = 4) -> ModelInterface:
    text = f'name: "m" backend: "python" max_batch_size: {rows} sequence_batching {{ {block} }}'
    return ModelInterface.of(normalise(text_format.Parse(text, ModelConfig())))


class Bench:
    """A scheduler with one executor `e` of one instance, and requests that are named by number and sequence."""

    def __init__(self, block: str = "", rows: int = 4, delays: Delays | None = None, serve: bool = True) -> None:
        self.scheduler = SequenceScheduler("b", 100, delays or Delays())
        self.now = 0
        self.numbers = 0
        self.see(PolicyChanged(interface(block, rows)))
        if serve:
            self.see(VersionServed("e", 1, "h", 1))

    def see(self, *events: Observation) -> list[Decision]:
        return self.scheduler.observe_all(events, self.now)

    def request(self, name: str, flags: str = "", **more: int) -> RequestQueued:
        self.numbers += 1
        mark = SequenceMark(name, "s" in flags, "e" in flags)
        given = {"signature": 0, "timeout_us": 0, "deadline_ns": 0} | more
        return RequestQueued(
            self.numbers.to_bytes(16, "big"),
            1,
            0,
            1,
            given["signature"],
            given["timeout_us"],
            given["deadline_ns"],
            self.now,
            sequence=mark,
        )

    def send(self, name: str, flags: str = "", **more: int) -> list[Decision]:
        return self.see(self.request(name, flags, **more))

    def finish(self, batch: DispatchBatch) -> list[Decision]:
        return self.see(BatchFinished(batch.batch_id, batch.executor))

    def at(self, now_ns: int) -> list[Decision]:
        self.now = now_ns
        return self.scheduler.advance(now_ns)


def batch(decisions: list[Decision]) -> DispatchBatch:
    (one,) = decisions
    assert isinstance(one, DispatchBatch)
    return one


def names(one: DispatchBatch) -> list[object]:
    return [request.sequence.correlation_id for request in one.requests if request.sequence]
