"""Every key name in the log, and nothing else (the table of the design page, section 2).

Truth about a model lives in its slot: the hash tag `{m}`, so that one script may touch it on a Redis Cluster. No
command or script ever names keys of two slots.

    q:{m}:<level>:<lane>     accepted requests of one priority level and lane, deleted when all of one entry's are done
    ql:{m}                   set of "<level>:<lane>" that have a stream
    u:{m}                    hash request id -> "<attempt>:<size_bytes>" of every unsettled request; its length is the
                             exact number of accepted, unsettled requests
    n:{m}                    hash: `bytes` of unsettled payload, `token` last fencing token, `owner`, counters
    f:{m}                    facts for the owning batcher
    s:{m}:<version>:<hash>   statistics of one incarnation of a model version
    x:<executor>             batches for one executor
    r:<endpoint>             replies for one endpoint (a gateway incarnation)
    ctl                      control facts
    alive:<role>:<inc>       heartbeat of a process (a lease, not a fact)
    blob:<id>                large payloads and file overrides

Streams whose name starts with `local:` never leave their process (`charonia.eventlog.colocated`); in `local:x:` a
record may be a decoded `charonia.wire.RequestRecord` instead of bytes.
"""

from __future__ import annotations

from urllib.parse import quote

CONTROL = b"ctl"
LOCAL = b"local:"


def tag(model: str) -> str:
    """`{m}`: the model's hash tag. Braces, colons and control characters in a name are percent-encoded."""
    return "{" + quote(model, safe="-_.~ ") + "}"


def queue(model: str, level: int, lane: int = 0) -> bytes:
    return f"q:{tag(model)}:{level}:{lane}".encode()


def lanes(model: str) -> bytes:
    return f"ql:{tag(model)}".encode()


def unsettled(model: str) -> bytes:
    return f"u:{tag(model)}".encode()


def counters(model: str) -> bytes:
    return f"n:{tag(model)}".encode()


def facts(model: str) -> bytes:
    return f"f:{tag(model)}".encode()


def statistics(model: str, version: int, content_hash: str) -> bytes:
    return f"s:{tag(model)}:{version}:{content_hash}".encode()


def batches(executor: str) -> bytes:
    return f"x:{executor}".encode()


def replies(endpoint: str) -> bytes:
    return f"r:{endpoint}".encode()


def alive(role: str, incarnation: str) -> bytes:
    return f"alive:{role}:{incarnation}".encode()


def blob(blob_id: str) -> bytes:
    return f"blob:{blob_id}".encode()
