"""Bytes of everything that travels in the log: request, batch and response records.

Pure. A record is: fixed struct header + short strings + msgpack meta + raw tensor bytes. Meta describes the tensors and
repeats from request to request, so packed and unpacked metas are cached by their content; what differs each time
(ids, times) is in the header. Decoding makes views and copies nothing. Unknown record versions and lengths that do not
add up raise `InvalidRecord`: the reader logs such a record and drops it, and never crashes of it.

    request   header | endpoint | client id | sequence | lineage | trace context | meta [version, content hash, inputs,
              outputs, parameters, nothing, tenant, route of a prompt] | tensor bytes
    batch     header: msgpack of one dispatch; in the entry the request records follow as they are
    response  header | place | times | trace report | meta [model, version, outputs or error text, parameters] |
              tensor bytes

Requests alike travel as a wave (`waves`): one record with a column for each input, answered by one with a column for
each output.

Tensor bytes over some size may lie elsewhere: then a `Reference` stands in their place, and a flag says so.

All integers little-endian; times are wall clock ns since the epoch. Fields of an entry are named `h` (batch header),
`w` (a wave), `r` (one record) and `m` (many: their number, their lengths, then themselves; each field costs the log as
much as a small record).

What a later release may add: a value at the end of a meta, of a batch header or of a lineage; a flag that no bytes of
the record belong to; a field of an entry with another name. Older releases skip these, so they must do without them.
Every other change (of the fixed header, or a part before the meta) needs a new `WIRE_VERSION`, which older releases
refuse with `InvalidRecord`, or is sent only where all readers have announced that they understand it, as with
`ProcessJoined.reads_waves`. Old versions are read for ever (tests/golden).

May import tensors, traces and inference, and nothing above. Begin reading at `requests`, then `responses`.
"""

from __future__ import annotations

from charonia.errors import InvalidRecord

from .batches import BatchHeader
from .lineages import Lineage
from .records import (
    BLOB,
    FIELD_ABOUT,
    FIELD_HEADER,
    FIELD_RECORD,
    FIELD_RECORDS,
    FIELD_WAVE,
    FILE,
    MAX_CACHED_META_BYTES,
    WIRE_VERSION,
    Reference,
    TensorPlace,
    record_fields,
    records_of,
    slot_file,
    slot_name,
    slot_place,
)
from .requests import (
    FLAG_JOB,
    FLAG_JOURNALLED,
    FLAG_LINEAGE,
    FLAG_REFERENCE,
    FLAG_REPLY_BY_REFERENCE,
    FLAG_TIMED,
    FLAG_TRACED,
    RequestMeta,
    RequestRecord,
    at_level,
    batch_signature,
    pack_request,
    request_meta,
    unpack_request,
)
from .responses import (
    FLAG_BARE,
    FLAG_ERROR,
    FLAG_FINAL,
    FLAG_PLACED,
    FLAG_REPORTED,
    FLAG_TIMES,
    ResponseRecord,
    ResponseTemplate,
    failed_response,
    pack_failure,
    pack_response,
    refer_response,
    report_response,
    response_data,
    response_id,
    response_sizes,
    response_template,
    time_response,
    unpack_response,
    with_parameters,
)
from .sequence_fields import MAX_CORRELATION_ID_BYTES, BatchPlaces, SequenceMark, SequencePlace
from .waves import (
    MAX_WAVE_REQUESTS,
    PREFIX_BYTES,
    WAVE_BYTE,
    Wave,
    WaveReply,
    pack_wave_reply,
    reply_meta,
    requests_in,
    unpack_wave,
    unpack_wave_reply,
    wave_head,
    wave_reply_bytes,
    work_in,
)

__all__ = [
    "BLOB",
    "FIELD_ABOUT",
    "FIELD_HEADER",
    "FIELD_RECORD",
    "FIELD_RECORDS",
    "FIELD_WAVE",
    "FILE",
    "FLAG_BARE",
    "FLAG_ERROR",
    "FLAG_FINAL",
    "FLAG_JOB",
    "FLAG_JOURNALLED",
    "FLAG_LINEAGE",
    "FLAG_PLACED",
    "FLAG_REFERENCE",
    "FLAG_REPLY_BY_REFERENCE",
    "FLAG_REPORTED",
    "FLAG_TIMED",
    "FLAG_TIMES",
    "FLAG_TRACED",
    "MAX_CACHED_META_BYTES",
    "MAX_CORRELATION_ID_BYTES",
    "MAX_WAVE_REQUESTS",
    "PREFIX_BYTES",
    "WAVE_BYTE",
    "WIRE_VERSION",
    "BatchHeader",
    "BatchPlaces",
    "InvalidRecord",
    "Lineage",
    "Reference",
    "RequestMeta",
    "RequestRecord",
    "ResponseRecord",
    "ResponseTemplate",
    "SequenceMark",
    "SequencePlace",
    "TensorPlace",
    "Wave",
    "WaveReply",
    "at_level",
    "batch_signature",
    "failed_response",
    "pack_failure",
    "pack_request",
    "pack_response",
    "pack_wave_reply",
    "record_fields",
    "records_of",
    "refer_response",
    "reply_meta",
    "report_response",
    "request_meta",
    "requests_in",
    "response_data",
    "response_id",
    "response_sizes",
    "response_template",
    "slot_file",
    "slot_name",
    "slot_place",
    "time_response",
    "unpack_request",
    "unpack_response",
    "unpack_wave",
    "unpack_wave_reply",
    "wave_head",
    "wave_reply_bytes",
    "with_parameters",
    "work_in",
]
