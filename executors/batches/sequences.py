"""Keeps the state of the sequences that one loaded version serves on this executor (S39).

A model with implicit states can continue any sequence whose state is known, here or in the log, where it is written as
requests are settled. A model that keeps its sequences in its own process can continue only those it has seen; a
stateless model can continue all. A request of a sequence whose state is lost fails. Used in the event loop only.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from charonia.backend import Array
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, InternalError, InvalidRecord
from charonia.eventlog import port
from charonia.facts.sequence_states import SequenceAbout, SequenceState, SequenceStep, sequence_key
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from charonia.wire import BatchHeader, BatchPlaces, RequestRecord, SequenceMark, SequencePlace

from .sequence_batch import BatchSteps
from .sequence_tensors import SequenceTensors, Step, Tensors

_log = logging.getLogger(__name__)

LOST = (
    "sequence {id} of model '{model}' has lost its state with the executor that held it: it must be started again, "
    "with the START flag"
)

_SWEEP_REQUESTS = 1024
_IDLE_MARGIN_US = 60_000_000

Memory = Literal["states", "instances", "nothing"]
"""Where the state of a model's sequences is: in implicit states, in the instances' own memory, or nowhere."""


@dataclass(frozen=True, slots=True)
class KnownSequence:
    """A sequence after its last settled request.

    `partial_tensors` are the states of a rescheduled request (S41), which has sent `responses_sent` responses. An
    instance of another `generation` does not know the sequence.
    """

    run: bytes
    binding: int
    instance: int
    generation: int
    step: int
    tensors: Tensors
    used_us: int
    partial_tensors: Tensors | None = None
    responses_sent: int = 0
    unwritten: bytes = b""
    """Its record in the log, when the state in the log is older; else empty."""

    def is_at(self, binding: int, instance: int, generation: int) -> bool:
        """Whether this instance, in this generation, has the sequence under this binding."""
        return (self.binding, self.instance, self.generation) == (binding, instance, generation)

    def is_written_as(self, run: bytes, step: int) -> bool:
        """Whether the log has the state after this step."""
        return not self.unwritten and (self.run, self.step) == (run, step)


class Sequences:
    """The sequences of one loaded version."""

    def __init__(self, interface: ModelInterface, version: int, tensors: SequenceTensors, memory: Memory) -> None:
        block = interface.sequence_batching
        assert block is not None
        self._model = interface.name
        self._version = version
        self._every = block.checkpoint_every
        self._iterative = block.iterative
        self._clears_slots = block.direct and tensors.has_ready_control
        self.tensors = tensors
        self._memory = memory
        self._known: dict[bytes, KnownSequence] = {}
        self._never_written: dict[bytes, bytes] = {}
        self.leaving = 0
        """The number of pending reasons for sequences to leave. While there are any, every state is written."""
        self._max_idle_us = 2 * block.max_idle_us + _IDLE_MARGIN_US
        self._since_sweep = 0

    def to_restore(self, header: BatchHeader, records: Sequence[RequestRecord]) -> list[bytes]:
        """The keys of the sequences whose states must be read from the log first."""
        if header.sequences is None or self._memory != "states":
            return []
        return [
            self._key(record)
            for record, place in zip(records, header.sequences.places, strict=True)
            if not (_mark(record).start and not place.again) and not self._is_here(self._key(record), place)
        ]

    def restore(self, names: Sequence[bytes], found: Sequence[tuple[bytes, bytes] | None]) -> dict[bytes, bytes]:
        """Take over states from the log where they are those after the last settled request.

        Returns the records, by key, of sequences whose state in the log is older and may still be written.
        """
        behind: dict[bytes, bytes] = {}
        for key, one in zip(names, found, strict=True):
            known = self._known.pop(key, None)
            if one is None:
                continue
            try:
                about = SequenceAbout.unpack(key, one[0])
                if known is not None and (known.run, known.step) == (about.run, about.step):
                    self._known[key] = known  # no other executor has run a step since
                    continue
                state = SequenceState.unpack(one[1]) if one[1] else None
            except InvalidRecord:
                continue
            if state is None or (state.run, state.step) != (about.run, about.step):
                # the writer of the record may write states less often than this version does
                if self.checkpoints and self._never_written.get(key) != one[0]:
                    behind[key] = one[0]
                continue
            tensors = {tensor.name: _array(tensor) for tensor in state.tensors}
            if self._fit(tensors):
                self._known[key] = KnownSequence(about.run, -1, -1, 0, about.step, tensors, wall_ns() // 1000)
        return behind

    def stop_waiting(self, behind: Mapping[bytes, bytes]) -> None:
        """Do not wait again for the states of these, as long as their records stay the same."""
        self._never_written |= behind

    def begin(self, places: BatchPlaces, records: Sequence[RequestRecord], generation: int) -> BatchSteps:
        """Return the steps of a batch that an instance of this generation is about to run."""
        steps: list[Step] = []
        errors: dict[int, CharoniaError] = {}
        clears_slots = False
        for index, (record, place) in enumerate(zip(records, places.places, strict=True)):
            mark = _mark(record)
            start = mark.start and not place.again
            # an iterative request that is its own sequence ends when the model stops rescheduling it
            end = mark.end and not (self._iterative and mark.start)
            before: Tensors | None = self.tensors.initial
            known = self._known.get(self._key(record))
            if not start:
                before = self._before(known, place, places.instance, generation)
            elif self._clears_slots and known is not None and known.run != place.run:
                clears_slots |= known.is_at(place.binding, places.instance, generation)
            if before is None:
                errors[index] = InternalError(LOST.format(id=mark.correlation_id, model=self._model))
                before = self.tensors.initial
            step = Step(mark.correlation_id, start, end, place.slot, before)
            if place.again and known is not None:
                step.responses_sent = known.responses_sent
            steps.append(step)
        return BatchSteps(self.tensors, places.rows, steps, errors, clears_slots)

    def warm_up(self, count: int) -> BatchSteps:
        """The steps of warm-up requests: each is a whole sequence (C17)."""
        steps = [Step(number + 1, True, True, number, self.tensors.initial) for number in range(count)]
        return BatchSteps(self.tensors, 0, steps, {})

    def _before(
        self, known: KnownSequence | None, place: SequencePlace, instance: int, generation: int
    ) -> Tensors | None:
        """The states before a request; None when they are lost."""
        if self._memory == "nothing":
            return self.tensors.initial
        if known is None or known.run != place.run:
            return None
        if self._memory == "instances":
            return self.tensors.initial if known.is_at(place.binding, instance, generation) else None
        return known.partial_tensors if place.again and known.partial_tensors is not None else known.tensors

    def _is_here(self, key: bytes, place: SequencePlace) -> bool:
        known = self._known.get(key)
        return known is not None and (known.run, known.binding) == (place.run, place.binding)

    def _fit(self, tensors: Mapping[str, Array]) -> bool:
        """Whether states that another load of the version wrote fit this one."""
        for state in self.tensors.states:
            array = tensors.get(state.input_name)
            if array is None or array.dtype != state.datatype.numpy or len(array.shape) != len(state.dims):
                return False
            if any(want not in (-1, have) for have, want in zip(array.shape, state.dims, strict=True)):
                return False
        return True

    # -- after execution ----------------------------------------------------------------------------------------------

    def commit(
        self,
        header: BatchHeader,
        records: Sequence[RequestRecord],
        steps: BatchSteps,
        ended: Collection[int],
        failed: Collection[int],
        again: Collection[int],
        executor: str,
        generation: int,
        *,
        is_leaving: bool = False,
    ) -> tuple[dict[bytes, SequenceStep], dict[int, KnownSequence | None]]:
        """Keep the new states of a batch. `ended` are indices of requests with an answer, `failed` of failed ones.

        `is_leaving`: the batch's sequences are about to move elsewhere, so their states are written. Returns the steps
        to write to the log, by request id, and the previous states, by index, for `roll_back`.
        """
        assert header.sequences is not None
        written: dict[bytes, SequenceStep] = {}
        before: dict[int, KnownSequence | None] = {}
        used_us = wall_ns() // 1000
        self._sweep(used_us, len(records))
        for index, (record, place) in enumerate(zip(records, header.sequences.places, strict=True)):
            step, key = steps.steps[index], self._key(record)
            known = self._known.get(key)
            if index in again:
                self._keep_partial(key, place, step, header.sequences.instance, generation)
                continue
            if index not in ended:
                continue
            before[index] = known
            if _mark(record).end:
                self._known.pop(key, None)
                written[record.id] = SequenceStep(key, b"")
                continue
            if index in steps.errors:
                del before[index]
                continue
            changed = index not in failed
            number = 0 if step.start or known is None else known.step
            tensors = step.state_after if changed and step.state_after is not None else step.state_before
            if place.again and not changed:  # undo the earlier executions of the request
                tensors = known.tensors if known is not None else self.tensors.initial
            number += changed
            place_of = (header.sequences.instance, place.slot, place.binding)
            about = SequenceAbout(
                key, place.run, self._version, header.content_hash, executor, *place_of, number, used_us
            ).pack()
            state, unwritten = None, b""
            if self.checkpoints and not (known is not None and known.is_written_as(place.run, number)):
                if is_leaving or self.leaving or number % self._every == 0:
                    state = self._packed(place.run, number, tensors)
                else:
                    unwritten = about
            self._known[key] = KnownSequence(
                place.run, place.binding, place_of[0], generation, number, tensors, used_us, unwritten=unwritten
            )
            written[record.id] = SequenceStep(key, about, state)
        return written, before

    # -- before sequences leave ---------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> bool:
        """Whether states are written to the log at all."""
        return self._memory == "states" and self._every > 0

    def unwritten(self) -> list[bytes]:
        """The keys of the sequences whose newest state is not in the log."""
        return [key for key, known in self._known.items() if known.unwritten]

    def newest(self, key: bytes) -> tuple[bytes, bytes] | None:
        """The record of a sequence and its packed state; None when the state is written or never will be, or the
        sequence has ended.
        """
        known = self._known.get(key)
        if known is None or not known.unwritten:
            return None
        packed = self._packed(known.run, known.step, known.tensors)
        if packed is None:
            self._known[key] = replace(known, unwritten=b"")
            return None
        return known.unwritten, packed

    def mark_written(self, key: bytes, about: bytes) -> None:
        """Record that the log has the state of this record."""
        known = self._known.get(key)
        if known is not None and known.unwritten == about:
            self._known[key] = replace(known, unwritten=b"")

    def _keep_partial(self, key: bytes, place: SequencePlace, step: Step, instance: int, generation: int) -> None:
        known = self._known.get(key)
        if known is None or known.run != place.run or step.start:
            known = KnownSequence(place.run, place.binding, instance, generation, 0, self.tensors.initial, 0)
        self._known[key] = replace(
            known,
            binding=place.binding,
            instance=instance,
            generation=generation,
            used_us=wall_ns() // 1000,
            partial_tensors=step.state_after,
            responses_sent=step.responses_sent,
        )

    def roll_back(self, records: Sequence[RequestRecord], before: Mapping[int, KnownSequence | None]) -> None:
        """Restore the previous states of requests that were settled elsewhere. `before` is from `commit`."""
        for index, known in before.items():
            if known is None:
                self._known.pop(self._key(records[index]), None)
            else:
                self._known[self._key(records[index])] = known

    def forget(self, records: Sequence[RequestRecord], indices: Collection[int]) -> None:
        """Forget sequences of which the log may or may not have the last step: their states are read again."""
        if self._memory == "states":
            for index in indices:
                self._known.pop(self._key(records[index]), None)

    def forget_if_logged(self, records: Sequence[RequestRecord], indices: Collection[int]) -> None:
        """Forget sequences whose requests were settled elsewhere, if the log has the state of each step."""
        if self._every == 1:
            self.forget(records, indices)

    def _sweep(self, now_us: int, more: int) -> None:
        """Forget, from time to time, sequences that were idle for so long that their owner has dropped them."""
        self._since_sweep += more
        if self._since_sweep >= _SWEEP_REQUESTS:
            self._since_sweep = 0
            self._never_written.clear()
            for key in [key for key, known in self._known.items() if known.used_us + self._max_idle_us < now_us]:
                del self._known[key]

    def _packed(self, run: bytes, number: int, tensors: Tensors) -> bytes | None:
        """The state as the log keeps it; None for one that it would not take, which is lost with this executor."""
        packed = SequenceState(run, number, tuple(Tensor.of(name, array) for name, array in tensors.items())).pack()
        if len(packed) <= port.MAX_RECORD_BYTES:
            return packed
        _log.warning(
            "the state of a sequence has %d bytes and is not written to the log, which takes less", len(packed)
        )
        return None

    def _key(self, record: RequestRecord) -> bytes:
        return sequence_key(self._version, _mark(record).key)


def _mark(record: RequestRecord) -> SequenceMark:
    # the owner dispatches only requests that have one
    return record.sequence or SequenceMark(0)


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.array()
    return array
