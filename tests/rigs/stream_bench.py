"""A decoupled model on a job bench: responses are written one by one, as its executor would."""

from __future__ import annotations

from typing import Any

import job_bench
import numpy as np
from job_bench import MODEL

from charonia import keys
from charonia.datatypes import DataType
from charonia.errors import CharoniaError
from charonia.facts.jobs import OUTCOME_CODES, JobEnd, JobState
from charonia.tensors import Tensor
from charonia.wire import RequestRecord, pack_failure, pack_response, record_fields

DECOUPLED = job_bench.CONFIG + "model_transaction_policy { decoupled: true }\n"
REPEATABLE = DECOUPLED + 'parameters { key: "charonia.repeatable" value { string_value: "true" } }\n'

__all__ = ["DECOUPLED", "MODEL", "REPEATABLE", "StreamBench", "job_bench"]


def tensors(value: int) -> list[Tensor]:
    data = np.array([[value]], np.int32).tobytes()
    return [Tensor(name, DataType.INT32, (1, 1), data) for name in ("y", "z")]


class StreamBench(job_bench.JobBench):  # type: ignore[misc,name-defined]
    async def respond(
        self,
        record: RequestRecord,
        index: int,
        value: int | None = None,
        *,
        attempt: int = 1,
        final: bool = False,
        error: CharoniaError | None = None,
        size: int = 0,
    ) -> None:
        """One placed response; without a value and an error a flag alone."""
        place = (attempt, index)
        if error is not None:
            packed = pack_failure(record.id, MODEL, 1, error, final=final, place=place)
        else:
            outputs = [] if value is None else tensors(value)
            if size:
                outputs = [Tensor("y", DataType.INT32, (1, size // 4), bytes(size))]
            packed = pack_response(record.id, MODEL, 1, outputs, {}, final=final, place=place, is_flag=not outputs)
        await self.log.append(keys.replies(record.endpoint), record_fields([packed]))

    async def refuse(self, record: RequestRecord, error: CharoniaError) -> None:
        """The failure of the request as a whole."""
        packed = pack_failure(record.id, MODEL, 1, error)
        await self.log.append(keys.replies(record.endpoint), record_fields([packed]))

    async def settle(self, record: RequestRecord, attempt: int = 1, state: JobState = JobState.SUCCEEDED) -> Any:
        ends = {record.id: JobEnd(state)} if record.is_job else None
        return await self.log.settle(MODEL, [(record.id, attempt)], None, [], ends=ends)

    # -- jobs: responses are kept, the last one is the result ---------------------------------------------------------

    async def answer(self, record: RequestRecord, index: int, value: int, *, attempt: int = 1) -> bool:
        packed = pack_response(record.id, MODEL, 1, tensors(value), {}, final=False, place=(attempt, index))
        return bool(await self.log.add_job_responses(MODEL, record.id, attempt, index, [packed]))

    async def end(
        self,
        record: RequestRecord,
        index: int,
        value: int | None = None,
        *,
        attempt: int = 1,
        error: CharoniaError | None = None,
    ) -> None:
        if error is not None:
            result, state = pack_failure(record.id, MODEL, 1, error), JobState.FAILED
        else:
            outputs = [] if value is None else tensors(value)
            place, is_flag = (attempt, index), not outputs
            result = pack_response(record.id, MODEL, 1, outputs, {}, final=True, place=place, is_flag=is_flag)
            state = JobState.SUCCEEDED
        detail = {} if error is None else {"error": error.message, "code": error.code.name}
        (won,) = await self.log.settle(
            MODEL, [(record.id, attempt)], None, [], ends={record.id: JobEnd(state, result, detail)},
            outcomes=OUTCOME_CODES[state],
        )  # fmt: skip
        assert won
