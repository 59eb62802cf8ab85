"""Bytes written by an earlier release are read for ever: one committed file of hexadecimal text per record kind.

A layout change adds files of the new version beside these; these never change.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from charonia.datatypes import DataType
from charonia.errors import InvalidArgument, InvalidRecord
from charonia.facts.events import (
    BatchDied,
    BatchDiedInCompany,
    BatchFinished,
    BatchReturned,
    ExecutionUnwanted,
    ExecutorDescribed,
    ExecutorDraining,
    Fact,
    LaneOpened,
    LanesWeighed,
    ModelExcluded,
    ModelRequested,
    ModelRequestFinished,
    OwnerChanged,
    ProcessJoined,
    ProcessLeft,
    QueueCommanded,
    RepositoryScanned,
    RequestCancelled,
    RequestsEnded,
    RequestsMoved,
    RequestsRescheduled,
    ResponsesBegun,
    ResponsesWanted,
    RouteChanged,
    SlotFreed,
    StatisticsWanted,
    StatisticsWritten,
    TraceSettingChanged,
    VersionAnnounced,
    VersionFailed,
    VersionHealthChanged,
    VersionHeld,
    VersionLoaded,
    VersionStateChanged,
    VersionUnloaded,
    VersionWanted,
    pack_fact,
    unpack_fact,
)
from charonia.facts.sequence_states import SequenceAbout, SequenceState
from charonia.generation.prompt_keys import PromptRoute
from charonia.inference import RECEIPT
from charonia.tensors import Tensor, join_bytes_elements
from charonia.traces.contexts import PROPAGATED, TIMESTAMPS, Context
from charonia.traces.reports import BACKEND_OUTPUT, Report, ReportedTensor
from charonia.wire import (
    FILE,
    FLAG_JOB,
    FLAG_REFERENCE,
    FLAG_REPLY_BY_REFERENCE,
    BatchHeader,
    BatchPlaces,
    Lineage,
    Reference,
    SequenceMark,
    SequencePlace,
    pack_failure,
    pack_request,
    pack_response,
    pack_wave_reply,
    record_fields,
    records_of,
    refer_response,
    reply_meta,
    report_response,
    request_meta,
    time_response,
    unpack_request,
    unpack_response,
    unpack_wave,
    unpack_wave_reply,
    wave_head,
    with_parameters,
)
from charonia.wire.recorded_calls import RecordedCall, RecordedStep, pack_recorded_call, unpack_recorded_call

HERE = Path(__file__).parent
ID = bytes(range(16))
INPUTS = [
    Tensor("x", DataType.FP32, (2, 2), bytes(range(16))),
    Tensor("s", DataType.BYTES, (2, 1), join_bytes_elements([b"a", "é"])),
]
OUTPUT = Tensor("y", DataType.BF16, (1, 3), b"\x00\x3f\x80\x3f\x00\x40")
PARAMETERS = {"text": "v", "count": 3, "flag": True, "ratio": 0.5}
REFERENCE = Reference(FILE, "g-1/0a1b", sum(len(t.data) for t in INPUTS))
ANSWER_REFERENCE = Reference(FILE, "g-1/0a1c", len(OUTPUT.data))
MARK = SequenceMark("call-é", start=True)
SCOPED_MARK = SequenceMark(2**64 - 1, end=True, scope=7)
PLACES = BatchPlaces(1, 4, (SequencePlace(0, ID, 1), SequencePlace(3, ID, 2, again=True)))
PROMPT = PromptRoute(70, 2**32 - 1, bytes(range(16)))
LINEAGE = Lineage((("à", ID), ("b", ID)), "tenant")
RECORDED_RESPONSE = pack_response(ID, "m", 3, [OUTPUT], {})
RECORDED_FAILURE = pack_failure(ID, "m", 3, InvalidArgument("why é"))
RECORDED = RecordedCall(
    2**50, 3, INPUTS, (unpack_response(RECORDED_RESPONSE), unpack_response(RECORDED_FAILURE)), ("y", "z"), PARAMETERS,
    tenant="north wind", client_id="é-1", sequence=RecordedStep(2**64 - 1, start=True, end=False),
)  # fmt: skip
UNKEPT = RecordedCall(
    11, 3, [], (), sequence=RecordedStep("call-é", start=False, end=True), parameters={}, unkept="why not é"
)
OF_JOB = replace(RECORDED, responses=(), job=ID)
CONTEXT = Context(TIMESTAMPS | PROPAGATED, ID, ID[:8], "vendor=1", "g-1")
REPORT = Report(
    ID[:8],
    "m",
    3,
    "é",
    (("QUEUE_START", 11), ("REQUEST_END", 2**60)),
    "why é",
    (("charonia.executor", "e-1"), ("charonia.batch_size", 2)),
    (ReportedTensor.of(BACKEND_OUTPUT, OUTPUT),),
    (Report(ID[8:], "n", 1, "", (("QUEUE_START", 12),)),),
)
BLOCKED = Lineage((("a", ID), ("b", ID[::-1])), "", 1)
OF_STEP = Lineage((), "tenant", 0, ("é", ID[::-1]))
HEADER = BatchHeader("owner-7-1", "m", 3, "abc", 7, (1, 2), b"f:{m}", via_owner=True)
SEQUENCES_HEADER = structs.replace(HEADER, sequences=PLACES)
WAVES_HEADER = structs.replace(HEADER, via_owner=False, waves=((b"q:{m}:0:0", b"11-0"), (b"q:{m}:2:1", b"12-3")))
PREFIX = ID[:15]
STRINGS = [join_bytes_elements([b"a", "é"]), join_bytes_elements([b"", b"bc"]), join_bytes_elements([b"d", b"efg"])]
WAVE_OUTPUTS = (("y", DataType.BF16, (1, 3), 6), ("z", DataType.UINT8, (1,), 1))

FACTS: list[Fact] = [
    ProcessJoined("executor", "e-1", pool="gpu", host="h", pid=7, hosts_batcher=True),
    ProcessLeft("gateway", "g-1", "lost"),
    RepositoryScanned("e-1", ("a", "b"), "explicit", ready=True),
    ModelRequested("load", "m", "r-1", '{"name":"m"}', {"1/model.py": "blob-1"}, unload_dependents=True),
    ModelRequestFinished("e-1", "r-1", 3, "why"),
    VersionStateChanged("e-1", "m", 3, "LOADING"),
    VersionLoaded("e-1", "m", 3, "abc", 2, b"\x0a\x01m", {"y": ["cat", "dog"]}, 12),
    VersionFailed("e-1", "m", 3, 1, "Internal: why"),
    VersionUnloaded("e-1", "m", 3, "unloaded"),
    VersionHealthChanged("e-1", "m", 3, well=False),
    LaneOpened(2, 1),
    BatchFinished("e-1", "owner-7-1", (("g-1", b"record"),)),
    BatchReturned("e-1", "owner-7-1", "drains"),
    RequestCancelled(ID),
    BatchDied("e-1", "owner-7-1", "killed by signal 11", "last line", blameless=True),
    RequestsEnded(ID, "cancelled"),
    RequestsMoved(ID),
    ExecutionUnwanted("owner-7-1", ID),
    QueueCommanded("pause"),
    LanesWeighed({"7": 3}),
    TraceSettingChanged("m", {"level": 3, "count": 5}, "0a1b"),
    ExecutorDescribed("e-1", {"device": "cpu,gpu", "zone": "a"}, 11, 12, 2, 3),
    ExecutorDraining("e-1"),
    VersionAnnounced("e-1", "m", 3, "abc", b"\x0a\x01m", {"y": ["cat", "dog"]}),
    VersionHeld("e-1", "m", 3, 2, 12),
    VersionWanted("m", 3),
    RouteChanged("m", 3, '{"present":2}'),
    ModelExcluded("e-1", "m", "why"),
    RequestsRescheduled("e-1", "owner-7-1", ID),
    BatchDiedInCompany("e-1", "owner-7-1", "killed by signal 11", "last line", "m_0", ID),
    SlotFreed("e-1", "owner-7-1"),
    ResponsesBegun("e-1", "owner-7-1", ID),
    ResponsesWanted("owner-7-1", ID, 70000),
    OwnerChanged("m"),
    StatisticsWanted("g-1", "0a1b"),
    StatisticsWritten("e-1", "0a1b"),
]
WITH_MORE: dict[str, Fact] = {
    "batch_finished_with_tokens": BatchFinished("e-1", "owner-7-1", tokens=70000),
    "request_cancelled_gently": RequestCancelled(ID, gentle=True),
    "execution_unwanted_gently": ExecutionUnwanted("owner-7-1", b"", ID),
    "model_requested_of_a_directory": ModelRequested("load", "m", "r-1", alias="a", directory="/d/a/model"),
    "repository_scanned_and_registered": RepositoryScanned("e-1", ("m",), "explicit", True, {"a": "/d/a::m"}),
    "process_joined_reads_waves": ProcessJoined("batcher", "b-1", host="h", pid=7, reads_waves=True),
    "process_joined_reads_wave_slots": ProcessJoined("executor", "e-1", host="h", pid=7, reads_wave_slots=True),
    "process_joined_in_pid_space": ProcessJoined("batcher", "b-1", host="h", pid=7, pid_space="s 4", started_ticks=9),
    "version_loaded_takes_waves": VersionLoaded(
        "e-1", "m", 3, "abc", 2, b"\x0a\x01m", {"y": ["cat", "dog"]}, 12, takes_waves=True
    ),
    "version_failed_unpolled": VersionFailed("e-1", "m", 3, 1, "Internal: why", unpolled=True),
    "version_loaded_with_memory": VersionLoaded("e-1", "m", 3, "abc", 2, b"\x0a\x01m", memory={"GPU 0": 2**33}),
    "version_loaded_overridden": VersionLoaded(
        "e-1", "m", 3, "abc", 2, b"\x0a\x01m", override_id="4f", override_config='{"max_batch_size": 2}'
    ),
}
"""Kinds of an earlier release with what was added to them."""


WAVE_COLUMN = Reference(FILE, "g-1/s1-2-1000", 48)
WAVE_REFERENCES = (Reference(FILE, "g-1/s1-2-1000", 16), Reference(FILE, "g-1/s2-f-1040", 16))
WAVE_ANSWER = Reference(FILE, "e-1/s1-3-1000", 21)
ABOUT = SequenceAbout(b"3:n", ID, 3, "abc", "e-1", 1, 2, 3, 4, 5)
STATE = SequenceState(ID, 4, (OUTPUT,))


def request(endpoint: bytes, client_id: bytes = b"", tenant: str = "", **more: Any) -> bytes:
    meta = request_meta(3, "abc", INPUTS, ("y",), PARAMETERS).of_tenant(tenant)
    data = () if "reference" in more else [t.data for t in INPUTS]
    values = {"rows": 2, "signature": 1, "level": 0, "accepted_ns": 11} | more
    return pack_request(ID, endpoint, client_id, meta, data, **values)


def wave(**more: Any) -> bytes:
    """A wave of three requests; with `sizes`, its second input is of BYTES that differ in length."""
    inputs = INPUTS if "sizes" in more else INPUTS[:1]
    meta = request_meta(3, "abc", inputs, ("y",), PARAMETERS)
    values = {"rows": 2, "signature": 2**64 - 1, "level": 0, "accepted_ns": 11} | more
    columns = [bytes(range(48))] + ([b"".join(STRINGS)] if "sizes" in more else [])
    return b"".join((wave_head(PREFIX, 3, b"g-1", meta, **values), *columns))


def whole_wave() -> bytes:
    """A wave with all that one may have."""
    about = {"level": 5, "timeout_us": 13, "client_ids": ["é-1".encode(), b"", b"c"], "deadlines": [12, 0, 2**63]}
    return wave(sizes=[[16] * 3, [len(text) for text in STRINGS]], **about)


def wave_by_reference() -> bytes:
    """A wave of two requests whose tensors lie elsewhere."""
    meta = request_meta(3, "abc", INPUTS[:1], ("y",), PARAMETERS)
    about = {"rows": 2, "signature": 1, "level": 0, "accepted_ns": 11, "reply_by_reference": True}
    return wave_head(PREFIX, 2, b"g-1", meta, **about, references=WAVE_REFERENCES)


def wave_in_slot() -> bytes:
    """A wave of three requests whose only column lies in a slot."""
    meta = request_meta(3, "abc", INPUTS[:1], ("y",), PARAMETERS)
    about = {"rows": 2, "signature": 1, "level": 0, "accepted_ns": 11, "client_ids": [b"a", b"", b"c"]}
    return wave_head(PREFIX, 3, b"g-1", meta, **about, column_at=WAVE_COLUMN)


def wave_reply(reference: Reference | None = None) -> bytes:
    columns = [bytes(range(18)), b"\x01\x02\x03"] if reference is None else []
    return pack_wave_reply(PREFIX, 3, reply_meta("m", 3, WAVE_OUTPUTS), columns, 2**40, reference)


def written() -> dict[str, bytes]:
    """What this release writes, by file name."""
    whole = {"signature": 2**64 - 1, "level": 5, "deadline_ns": 12, "timeout_us": 13}
    traced = {"lineage": LINEAGE, "trace": CONTEXT}
    records = {
        "wire/v1-request.hex": request(b"g-1", "é-1".encode(), **whole),
        "wire/v1-request-by-reference.hex": request(b"", flags=FLAG_JOB, reference=REFERENCE),
        "wire/v1-request-of-sequence.hex": request(b"g-1", sequence=MARK),
        "wire/v1-request-of-scoped-sequence.hex": request(b"", accepted_ns=1, sequence=SCOPED_MARK),
        "wire/v1-request-of-call.hex": request(b"e-1", sequence=MARK, lineage=LINEAGE),
        "wire/v1-request-of-blocking-call.hex": request(b"e-1", lineage=BLOCKED),
        "wire/v1-request-of-step.hex": request(b"ensemble.e", lineage=OF_STEP),
        "wire/v1-request-traced.hex": request(b"g-1", **traced),
        "wire/v1-request-windowed.hex": request(b"ensemble.e", **traced, window=70000),
        "wire/v1-request-of-prompt.hex": request(b"g-1", prompt=PROMPT),
        "wire/v1-request-of-tenant.hex": request(b"g-1", tenant="north wind"),
        "wire/v1-request-of-prompt-of-tenant.hex": request(b"g-1", tenant="north wind", prompt=PROMPT),
        "wire/v1-response-reported.hex": report_response(
            time_response(pack_response(ID, "m", 3, [OUTPUT], {}, place=(2, 7)), (11, 2**40, 13)), REPORT
        ),
        "wire/v1-batch-header-of-sequences.hex": SEQUENCES_HEADER.pack(),
        "wire/v1-sequence-about.hex": ABOUT.pack(),
        "wire/v1-sequence-state.hex": STATE.pack(),
        "wire/v1-response-placed.hex": pack_response(ID, "m", 3, [OUTPUT], {}, final=False, place=(2, 7)),
        "wire/v1-response-bare.hex": pack_response(ID, "m", 3, [], {}, place=(2, 7)),
        "wire/v1-response-flag.hex": pack_response(ID, "m", 3, [], {}, place=(2, 7), is_flag=True),
        "wire/v1-failure-placed.hex": pack_failure(ID, "m", 3, InvalidArgument("why é"), place=(1, 0)),
        "wire/v1-response-by-reference.hex": refer_response(pack_response(ID, "m", 3, [OUTPUT], {}), ANSWER_REFERENCE),
        "wire/v1-response-timed.hex": time_response(
            pack_response(ID, "m", 3, [OUTPUT], {}, place=(2, 7)), (11, 2**40, 13)
        ),
        "wire/v1-response.hex": pack_response(ID, "m", 3, [OUTPUT], PARAMETERS),
        "wire/v1-response-part.hex": pack_response(ID, "m", 3, [OUTPUT], {}, final=False),
        "wire/v1-failure.hex": pack_failure(ID, "m", 3, InvalidArgument("why é")),
        "wire/v1-failure-with-receipt.hex": with_parameters(
            pack_failure(ID, "m", 3, InvalidArgument("why é")), {RECEIPT: '{"failed":true}'}
        ),
        "wire/v1-batch-header.hex": HEADER.pack(),
        "wire/v1-wave.hex": wave(),
        "wire/v1-wave-whole.hex": whole_wave(),
        "wire/v1-wave-by-reference.hex": wave_by_reference(),
        "wire/v1-wave-in-slot.hex": wave_in_slot(),
        "wire/v1-wave-reply.hex": wave_reply(),
        "wire/v1-wave-reply-by-reference.hex": wave_reply(WAVE_ANSWER),
        "wire/v1-batch-header-of-waves.hex": WAVES_HEADER.pack(),
        "wire/v1-recorded-call.hex": b"".join(pack_recorded_call(RECORDED, [RECORDED_RESPONSE, RECORDED_FAILURE])),
        "wire/v1-recorded-call-unkept.hex": b"".join(pack_recorded_call(UNKEPT, [])),
        "wire/v1-recorded-call-of-job.hex": b"".join(pack_recorded_call(OF_JOB, [])),
        "wire/v1-joined-records.hex": bytes(record_fields([b"one", b"", b"three"])[1]),
    }
    facts = {fact.kind: fact for fact in FACTS} | WITH_MORE
    return records | {f"events/{name}.hex": pack_fact(fact) for name, fact in facts.items()}


def kept(name: str) -> bytes:
    return bytes.fromhex((HERE / name).read_text())


def test_a_request_is_read() -> None:
    record = unpack_request(kept("wire/v1-request.hex"))
    assert (record.id, record.endpoint, record.client_id) == (ID, "g-1", "é-1")
    assert (record.rows, record.signature, record.level) == (2, 2**64 - 1, 5)
    assert (record.accepted_ns, record.deadline_ns, record.timeout_us) == (11, 12, 13)
    assert (record.meta.version, record.meta.content_hash, record.meta.outputs) == (3, "abc", ("y",))
    assert record.meta.parameters == PARAMETERS
    assert record.inputs() == INPUTS


def test_a_request_of_a_sequence_is_read() -> None:
    record = unpack_request(kept("wire/v1-request-of-sequence.hex"))
    assert (record.sequence, record.client_id, record.inputs()) == (MARK, "", INPUTS)
    assert unpack_request(kept("wire/v1-request.hex")).sequence is None
    assert unpack_request(kept("wire/v1-request-of-scoped-sequence.hex")).sequence == SCOPED_MARK
    assert SequenceAbout.unpack(b"3:n", kept("wire/v1-sequence-about.hex")) == ABOUT
    assert SequenceState.unpack(kept("wire/v1-sequence-state.hex")) == STATE


def test_a_request_of_a_prompt_is_read() -> None:
    record, plain = unpack_request(kept("wire/v1-request-of-prompt.hex")), unpack_request(kept("wire/v1-request.hex"))
    assert (record.meta.prompt, record.meta.packed, record.inputs()) == (PROMPT, plain.meta.packed, INPUTS)
    assert plain.meta.prompt is None


def test_a_request_of_a_tenant_is_read() -> None:
    record = unpack_request(kept("wire/v1-request-of-tenant.hex"))
    assert (record.meta.tenant, record.meta.prompt, record.inputs()) == ("north wind", None, INPUTS)
    prompted = unpack_request(kept("wire/v1-request-of-prompt-of-tenant.hex"))
    assert (prompted.meta.tenant, prompted.meta.prompt, prompted.inputs()) == ("north wind", PROMPT, INPUTS)
    assert unpack_request(kept("wire/v1-request.hex")).meta.tenant == ""


def test_a_request_of_a_call_is_read() -> None:
    record = unpack_request(kept("wire/v1-request-of-call.hex"))
    assert (record.lineage, record.sequence, record.inputs()) == (LINEAGE, MARK, INPUTS)
    assert unpack_request(kept("wire/v1-request-of-sequence.hex")).lineage is None


def test_a_request_of_a_step_is_read() -> None:
    record = unpack_request(kept("wire/v1-request-of-step.hex"))
    assert (record.lineage, record.inputs()) == (OF_STEP, INPUTS)


def test_a_request_of_a_call_that_blocks_its_caller_is_read() -> None:
    record = unpack_request(kept("wire/v1-request-of-blocking-call.hex"))
    assert record.lineage == BLOCKED
    assert record.lineage.blocked_ids() == (ID[::-1],)


def test_placed_responses_are_read() -> None:
    part, failed = (
        unpack_response(kept("wire/v1-response-placed.hex")),
        unpack_response(kept("wire/v1-failure-placed.hex")),
    )
    assert (part.place, part.final, part.outputs) == ((2, 7), False, [OUTPUT])
    assert (failed.place, failed.final, failed.error and failed.error.message) == ((1, 0), True, "why é")


def test_a_request_by_reference_is_read() -> None:
    record = unpack_request(kept("wire/v1-request-by-reference.hex"))
    assert (record.id, record.is_job, record.journalled) == (ID, True, False)
    assert (record.reference, bytes(record.data)) == (REFERENCE, b"")


def test_a_bare_response_is_told_from_a_flag() -> None:
    bare, flag = unpack_response(kept("wire/v1-response-bare.hex")), unpack_response(kept("wire/v1-response-flag.hex"))
    assert (bare.outputs, bare.final, bare.place, bare.is_flag) == ([], True, (2, 7), False)
    assert (flag.outputs, flag.final, flag.place, flag.is_flag) == ([], True, (2, 7), True)


def test_a_response_with_times_is_read() -> None:
    answer = unpack_response(kept("wire/v1-response-timed.hex"))
    assert (answer.place, answer.times, bytes(answer.outputs[0].data)) == ((2, 7), (11, 2**40, 13), OUTPUT.data)
    assert unpack_response(kept("wire/v1-response-placed.hex")).times is None


def test_traces_are_read() -> None:
    record = unpack_request(kept("wire/v1-request-traced.hex"))
    assert record.trace is not None
    assert (record.trace.context, record.lineage, record.inputs()) == (CONTEXT, LINEAGE, INPUTS)
    assert unpack_request(kept("wire/v1-request-of-call.hex")).trace is None
    answer = unpack_response(kept("wire/v1-response-reported.hex"))
    assert (answer.report, answer.place, answer.times) == (REPORT, (2, 7), (11, 2**40, 13))
    assert answer.outputs == [OUTPUT]


def test_a_window_is_read() -> None:
    record = unpack_request(kept("wire/v1-request-windowed.hex"))
    assert record.trace is not None
    assert (record.window, record.trace.context, record.inputs()) == (70000, CONTEXT, INPUTS)
    assert unpack_request(kept("wire/v1-request-traced.hex")).window == 0
    with pytest.raises(InvalidRecord):
        unpack_request(kept("wire/v1-request-windowed.hex")[:140])


def test_a_response_by_reference_is_read() -> None:
    asked = []
    data = kept("wire/v1-response-by-reference.hex")
    answer = unpack_response(data, lambda reference: asked.append(reference) or OUTPUT.data)
    assert (answer.outputs, asked) == ([OUTPUT], [ANSWER_REFERENCE])
    with pytest.raises(InvalidRecord):
        unpack_response(data)


def test_responses_are_read() -> None:
    whole, part = unpack_response(kept("wire/v1-response.hex")), unpack_response(kept("wire/v1-response-part.hex"))
    assert (whole.id, whole.model, whole.version, whole.error, whole.final) == (ID, "m", 3, None, True)
    assert whole.outputs == part.outputs == [OUTPUT]
    assert (whole.parameters, part.parameters, part.final) == (PARAMETERS, {}, False)


def test_the_receipt_of_a_failure_is_read() -> None:
    failed = unpack_response(kept("wire/v1-failure-with-receipt.hex"))
    assert isinstance(failed.error, InvalidArgument)
    assert (failed.error.message, failed.error.receipt) == ("why é", '{"failed":true}')


def test_a_failure_is_read() -> None:
    failed = unpack_response(kept("wire/v1-failure.hex"))
    assert (failed.id, failed.model, failed.version, failed.outputs) == (ID, "m", 3, [])
    assert type(failed.error) is InvalidArgument
    assert failed.error.message == "why é"


def test_a_batch_header_is_read() -> None:
    assert BatchHeader.unpack(kept("wire/v1-batch-header.hex")) == HEADER
    assert BatchHeader.unpack(kept("wire/v1-batch-header-of-sequences.hex")) == SEQUENCES_HEADER


def test_a_wave_is_read() -> None:
    found = unpack_wave(kept("wire/v1-wave.hex"))
    assert (found.prefix, found.count, found.endpoint, found.rows) == (PREFIX, 3, "g-1", 2)
    assert (found.signature, found.level, found.accepted_ns, found.timeout_us) == (2**64 - 1, 0, 11, 0)
    assert (found.client_ids, found.deadlines, found.sizes) == ((), (), ())
    assert [bytes(column) for column in found.columns] == [bytes(range(48))]
    assert [record.id for record in found.requests()] == [PREFIX + bytes((last,)) for last in range(3)]
    assert [record.inputs()[0].data for record in found.requests()] == [bytes(range(a, a + 16)) for a in (0, 16, 32)]


def test_a_wave_with_ids_deadlines_and_sizes_is_read() -> None:
    found = unpack_wave(kept("wire/v1-wave-whole.hex"))
    assert (found.level, found.timeout_us, found.deadlines) == (5, 13, (12, 0, 2**63))
    assert found.client_ids == ("é-1", "", "c")
    assert found.sizes == ((16, 16, 16), tuple(len(text) for text in STRINGS))
    records = found.requests()
    assert [bytes(record.inputs()[1].data) for record in records] == STRINGS
    assert [(record.client_id, record.deadline_ns) for record in records] == [("é-1", 12), ("", 0), ("c", 2**63)]
    assert {(record.meta.content_hash, record.meta.outputs, record.timeout_us) for record in records} == {
        ("abc", ("y",), 13)
    }


def test_a_wave_by_reference_is_read() -> None:
    found = unpack_wave(kept("wire/v1-wave-by-reference.hex"))
    assert (found.count, found.columns, found.references) == (2, (), WAVE_REFERENCES)
    assert found.reply_by_reference
    records = found.requests()
    assert [record.reference for record in records] == list(WAVE_REFERENCES)
    assert all(record.flags == FLAG_REFERENCE | FLAG_REPLY_BY_REFERENCE for record in records)
    assert not unpack_wave(kept("wire/v1-wave.hex")).reply_by_reference


def test_a_wave_in_a_slot_is_read() -> None:
    found = unpack_wave(kept("wire/v1-wave-in-slot.hex"))
    assert (found.count, found.columns, found.column_at) == (3, (), WAVE_COLUMN)
    records = found.requests()
    names = ["g-1/s1-2-1000", "g-1/s1-2-1010", "g-1/s1-2-1020"]
    assert [record.reference for record in records] == [Reference(FILE, name, 16) for name in names]
    assert [record.client_id for record in records] == ["a", "", "c"]
    found.columns = (bytes(range(48)),)
    assert [record.inputs()[0].data for record in found.requests()] == [bytes(range(a, a + 16)) for a in (0, 16, 32)]


def test_a_reply_by_reference_to_a_wave_is_read() -> None:
    reply = unpack_wave_reply(kept("wire/v1-wave-reply-by-reference.hex"))
    assert (reply.count, reply.reference, reply.columns) == (3, WAVE_ANSWER, ())
    reply.read_columns(bytes(range(21)))
    assert reply.columns == (bytes(range(18)), bytes(range(18, 21)))


def test_the_reply_to_a_wave_is_read() -> None:
    reply = unpack_wave_reply(kept("wire/v1-wave-reply.hex"))
    assert (reply.prefix, reply.count, reply.model, reply.version, reply.infer_ns) == (PREFIX, 3, "m", 3, 2**40)
    assert [(p.name, p.datatype, p.shape, p.size_bytes) for p in reply.outputs] == list(WAVE_OUTPUTS)
    assert reply.columns == (bytes(range(18)), b"\x01\x02\x03")


def test_the_header_of_a_batch_of_waves_is_read() -> None:
    assert BatchHeader.unpack(kept("wire/v1-batch-header-of-waves.hex")) == WAVES_HEADER
    assert BatchHeader.unpack(kept("wire/v1-batch-header.hex")).waves == ()


def test_a_recorded_call_is_read() -> None:
    found = unpack_recorded_call(kept("wire/v1-recorded-call.hex"))
    assert replace(found, responses=()) == replace(RECORDED, responses=())
    assert (found.responses[0].outputs, found.responses[1].error.__class__) == ([OUTPUT], InvalidArgument)
    assert unpack_recorded_call(kept("wire/v1-recorded-call-unkept.hex")) == UNKEPT
    assert unpack_recorded_call(kept("wire/v1-recorded-call-of-job.hex")) == OF_JOB


def test_joined_records_are_read() -> None:
    assert [bytes(r) for r in records_of([b"m", kept("wire/v1-joined-records.hex"), b"r", b"four"])] == [
        b"one",
        b"",
        b"three",
        b"four",
    ]


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.kind)
def test_a_fact_is_read(fact: Fact) -> None:
    assert unpack_fact(kept(f"events/{fact.kind}.hex")) == fact


@pytest.mark.parametrize("name", WITH_MORE)
def test_a_fact_with_what_was_added_is_read(name: str) -> None:
    assert unpack_fact(kept(f"events/{name}.hex")) == WITH_MORE[name]


def test_every_kind_has_its_bytes() -> None:
    assert {type(fact) for fact in FACTS} == set(Fact.__args__)
    assert {str(path.relative_to(HERE)) for path in HERE.rglob("*.hex")} >= set(written())


@pytest.mark.parametrize("name", sorted(written()))
def test_this_release_still_writes_them(name: str) -> None:
    """A difference here is a new layout: give it a version of its own and new files."""
    assert written()[name] == kept(name)
