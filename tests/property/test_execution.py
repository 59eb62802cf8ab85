"""What comes of a request does not depend on the others in its batch, however alike or unlike they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from instance_pool import MODEL, Doubling

from charonia.tensors import Tensor
from charonia.wire import (
    FILE,
    FLAG_JOURNALLED,
    Reference,
    RequestRecord,
    pack_request,
    record_fields,
    request_meta,
    requests_in,
)
from executors.batches.assembly import Planner, Workspace
from executors.batches.execution import Batch
from executors.settling.settlement import replies

NEVER_NS = 2**63

KINDS: list[dict[str, Any]] = [
    {"rows": 2, "rows_sent": 2},
    {"rows_sent": 2},
    {"rows_sent": 5, "rows": 5},
    {"rows": 2},
    {"deadline_ns": 1},
    {"deadline_ns": NEVER_NS},
    {"level": 3, "timeout_us": 9, "flags": FLAG_JOURNALLED},
    {"reference": Reference(FILE, "gone/x", 4)},
    {"outputs": ("y",)},
    {"outputs": ("z",)},
    {"name": "w"},
    {"dtype": np.int32},
    {"endpoint": b"gw2"},
    {"endpoint": b""},
]


def packed(number: int, own: dict[str, Any]) -> bytes:
    about = {"rows": 1, "rows_sent": 1, "name": "x", "dtype": np.float32, "outputs": (), "endpoint": b"gw1"} | own
    rows_sent, name, dtype = about.pop("rows_sent"), about.pop("name"), about.pop("dtype")
    tensor = Tensor.of(name, np.full((rows_sent, 1), number, dtype))
    meta = request_meta(1, "", [tensor], about.pop("outputs"), {})
    more = {"signature": 0, "level": 0, "accepted_ns": number} | about
    return pack_request(bytes([number]) * 16, more.pop("endpoint"), b"", meta, [tensor.data], **more)


def answers_of(records: list[RequestRecord], unwanted: frozenset[bytes], planner: Planner) -> list[bytes]:
    batch = Batch(planner, 1, records, unwanted)
    return batch.run_on(Doubling(), Workspace()).answers


@given(
    usual=st.just({}) | st.just({}) | st.sampled_from(KINDS),
    count=st.integers(1, 9),
    odd=st.dictionaries(st.integers(0, 4), st.sampled_from(KINDS), max_size=2),
    unwanted=st.just(set()) | st.sets(st.integers(0, 8), max_size=2),
    together=st.booleans(),
)
def test_a_request_is_answered_as_if_it_were_alone(
    usual: dict[str, Any], count: int, odd: dict[int, dict[str, Any]], unwanted: set[int], together: bool
) -> None:
    sent = [packed(number, odd.get(number, usual)) for number in range(count)]
    ids = frozenset(bytes([number]) * 16 for number in unwanted)
    records = requests_in(record_fields(sent)) if together else [requests_in([b"r", one])[0] for one in sent]
    planner = Planner(MODEL)
    alone = [answers_of([record], ids, planner)[0] for record in records]
    assert answers_of(records, ids, planner) == alone

    told = [index for index, answer in enumerate(alone) if answer]
    assert [bool(answer) for answer in alone] == [number not in unwanted for number in range(count)]
    expected: dict[str, list[bytes]] = {}
    for index in told:
        if records[index].endpoint:
            expected.setdefault(records[index].endpoint, []).append(alone[index])
    written = replies(records, alone, told)
    assert [reply.fields for reply in written] == [record_fields(answers) for answers in expected.values()]
