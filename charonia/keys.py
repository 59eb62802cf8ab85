"""The names of all keys in the log: the list, and a function for each.

Scripts in `eventlog/scripts` make names too (`job_events.lua` and `take_groups.lua` whole ones, others by a suffix).
Some are known by their first letters (`eventlog/embedded/private_server.py`, `eventlog/redis/portable/exporting.py`).

Pure. Truth about a model lives in its slot: the hash tag `{m}`, so that one script may touch it on a Redis Cluster. No
command or script ever names keys of two slots.

    q:{m}:<level>:<lane>     accepted requests of one priority level and lane, deleted when all of one entry's are done;
                             a wave (field `w`) is unsettled as long as its entry is there
    ql:{m}                   set of "<level>:<lane>" that have a stream
    u:{m}                    hash of every unsettled request: first 15 bytes of the id -> attempts and sizes of the
                             requests whose ids begin so (charonia.eventlog.redis.stored_records)
    n:{m}                    hash: `requests` and `bytes` unsettled, exact; `token` last fencing token, `owner`,
                             `paused`, what to keep of jobs and journal (`keep_*`), `kept` bytes of ended jobs,
                             `lease:<gateway>` capacity reserved for its waves, `leased_*` the sums of those,
                             `tk` once a request had progress
    f:{m}                    facts for the owning batcher
    n:{m}:<tenant>           hash: `requests` and `bytes` unsettled of one tenant
    job:{m}:<id>             hash of one job (`charonia.facts.jobs`): state, times, events, result
    jr:{m}:<id>              what a job has answered so far, all but the last, when its model answers more than once:
                             entry `<index + 1>-0`, with the attempt `a` and the response record `r`; gone with the job
    jr:{m}:<id>:given        when a caller was first given its outcome (`charonia.facts.jobs`)
    tk:{m}:<id>              list: what a later attempt of a request of a resumable model is given of its responses so
                             far, by index (`charonia.models.repeatable`); gone when the request is settled
    tk:{m}                   set of the ids that have such a list
    idem:{m}:<key>           the job an idempotency key stands for, and the digest of what was asked
    ja:{m}, jd:{m}           sorted sets of job ids: active ones by time accepted, ended ones by time ended
    ja:{m}:x                 sorted set of active jobs that have a deadline, by that
    ja:{m}:<level>:<lane>    sorted sets of active jobs by time accepted, of any level and lane but 0:0
    jm                       set of the models that have had jobs
    j:{m}                    journal: lifecycle facts, kept for a time
    j:{m}:seals              its seals (`charonia.facts.seals`), each under the id of the last entry it covers
    dlq:{m}                  dead letters
    sus:{m}                  note of the suspects that a co-located batcher has dispatched to its own executor
    ab:{m}                   what adaptive batching has chosen for a model's versions, for readers
    vis:{m}                  sorted set of requests of which a response is visible, by when, of models that answer more
                             than once and may not be run again; whatever settles the request removes it
    wh:{m}                   ended jobs whose webhook is to be called
    wht:{m}                  sorted set of the webhooks to call, by time; the senders' own
    whs:{m}:<id>             how far a job's webhook has come (`gateway.webhooks`), gone with the job
    s:{m}:<version>:<hash>   statistics of one incarnation of a model version
    us:{m}:<day>             what requests have used of a model on a day (since 1970, UTC), by hour and tenant
                             (`charonia.facts.usage`)
    usm                      set of the models that have `us` keys, by when
    rq:{m}:<id>              a recorded call of a model that records requests (`charonia.wire.recorded_calls`), kept for
                             days
    rqt:{m}                  sorted set of their ids by when they were recorded
    rqu:{m}                  the same set, and `rqu:{m}:sizes` their sizes in bytes (`Notes.keep_recent`)
    sh:{m}:<version>         how answers of a shadow version compare (`gateway.releases.shadow_requests`)
    n:{release%2F<m>}        `owner` and `token`: the gateway that judges a model's candidate, as a model's owner
    x:<executor>             batches for one executor
    r:<endpoint>             replies for one endpoint: a gateway incarnation, or an ensemble, whose steps answer there
    sl:{m}                   hash of live sequences: key -> where each is bound and how far it is
                             (`charonia.facts.sequence_states`)
    st:{m}                   hash of their states: key -> tensors
    gone                     sorted set, by when, of streams whose one reader left
                             (`batcher.housekeeping.departed_endpoints`)
    ctl                      control facts
    tc:<generation>          how many requests were traced since a bound was set (`gateway.tracing`)
    epoch                    the name of the log's contents
    fence:{m}                a value without meaning: WAIT covers earlier writes of other connections only after a
                             write of one's own (`charonia.eventlog.redis.durability`)
    wf:<batcher>             calls that wait at a batcher for long (`batcher.deadlock.waiting`), kept for seconds
    os:<gateway>             its open streams (`charonia.facts.stream_notes`), kept for seconds
    wr:<executor>            batches that wait for resources there (`charonia.facts.resource_waits`), kept for seconds
    alive:<role>:<inc>       heartbeat of a process (a lease, not a fact)
    blob:<id>                large payloads and file overrides; blob:m-<id> may be on a server of its own (--blob-url)
    bl, bl:<incarnation>     sorted sets by time: the processes that lend blobs, and the names that one lends under
    c:<hash>                 a cached response (`charonia.calls.cache.cache_store`), kept for a time
    cu:{cache}               sorted set of cached responses by last use, and `cu:{cache}:sizes` their sizes in bytes
                             (`Notes.keep_recent`)
    ce                       sorted set of cached responses by when they expire
    of:<file>                record of a file of the OpenAI API; its content is blob:<file>.<number>
    ofl:<tenant>             sorted set of a tenant's files by when they were made
    ofl:e:<tenant>           stream of the uploads that are being made files, whose order says which fit; expires
    ob:<batch>               facts about a batch of the OpenAI API (`gateway.openai.stored.batch_facts`)
    ob:{ob:<batch>}          the fence of those facts, in their slot: the largest token of a gateway that drove it
    obr:<batch>              results of its lines, deleted when it has ended
    obp:<batch>              how far it is
    obl:<tenant>             sorted set of a tenant's batches by when they were made
    oba, obx                 sorted sets of batches: those that have not ended, and all by when they are deleted
    n:{openai.<batch>}       `owner` and `token`: the gateway that drives it, as a model's owner
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from urllib.parse import quote

LANES = 64
"""Tenants share a level's queue streams, at most so many."""
_REMEMBERED = 4096
"""Names that each settlement and acceptance needs."""

CONTROL = b"ctl"
DEPARTED = b"gone"
EPOCH = b"epoch"
EPOCH_REWINDS = "+"
"""Between the value of that key and the number of rewinds that a process has seen, in what it calls the epoch."""
PASSING = "m-"
"""What the names of blobs begin with that only work at the level `memory` needs."""


@lru_cache(maxsize=1024)
def tag(model: str) -> str:
    """`{m}`: the model's hash tag. Braces, colons and control characters in a name are percent-encoded.

    An empty tag would be none: then a key's whole name decides its slot.
    """
    return "{" + (quote(model, safe="-_.~ ") or "%") + "}"


def queue(model: str, level: int, lane: int = 0) -> bytes:
    return f"q:{tag(model)}:{level}:{lane}".encode()


def lane_of(tenant: str) -> int:
    """The lane of a tenant, the same in every process; requests without one share lane 0."""
    if not tenant:
        return 0
    return int.from_bytes(hashlib.blake2b(tenant.encode(), digest_size=8).digest(), "little") % LANES


def lanes(model: str) -> bytes:
    return f"ql:{tag(model)}".encode()


@lru_cache(maxsize=_REMEMBERED)
def unsettled(model: str) -> bytes:
    return f"u:{tag(model)}".encode()


@lru_cache(maxsize=_REMEMBERED)
def counters(model: str) -> bytes:
    return f"n:{tag(model)}".encode()


def facts(model: str) -> bytes:
    return f"f:{tag(model)}".encode()


def tenant(model: str, name: str) -> bytes:
    return f"n:{tag(model)}:{quote(name, safe='-_.~ ')}".encode()


def job(model: str, job_id: bytes) -> bytes:
    return f"job:{tag(model)}:{job_id.hex()}".encode()


def job_responses(model: str, job_id: bytes) -> bytes:
    return f"jr:{tag(model)}:{job_id.hex()}".encode()


def progress(model: str, request_id: bytes) -> bytes:
    return f"tk:{tag(model)}:{request_id.hex()}".encode()


def progress_index(model: str) -> bytes:
    return f"tk:{tag(model)}".encode()


def idempotency(model: str, key_digest: bytes) -> bytes:
    return f"idem:{tag(model)}:{key_digest.hex()}".encode()


def job_delivery(model: str, job_id: bytes) -> bytes:
    return f"jr:{tag(model)}:{job_id.hex()}:given".encode()


def active_jobs(model: str) -> bytes:
    return f"ja:{tag(model)}".encode()


def job_deadlines(model: str) -> bytes:
    """Where scripts know `active_jobs`, they know this one, too."""
    return f"ja:{tag(model)}:x".encode()


def ended_jobs(model: str) -> bytes:
    return f"jd:{tag(model)}".encode()


JOB_MODELS = b"jm"


def fence(model: str) -> bytes:
    return f"fence:{tag(model)}".encode()


def suspicions(model: str) -> bytes:
    return f"sus:{tag(model)}".encode()


def visible(model: str) -> bytes:
    """Requests of which a response is visible and that may not be run again."""
    return b"vis:" + tag(model).encode()


def adaptive_choices(model: str) -> bytes:
    """What adaptive batching has chosen for a model's versions, for every reader."""
    return f"ab:{tag(model)}".encode()


def journal(model: str) -> bytes:
    return f"j:{tag(model)}".encode()


def journal_seals(model: str) -> bytes:
    return f"j:{tag(model)}:seals".encode()


def dead_letters(model: str) -> bytes:
    return f"dlq:{tag(model)}".encode()


def webhooks(model: str) -> bytes:
    return f"wh:{tag(model)}".encode()


def webhook_times(model: str) -> bytes:
    return f"wht:{tag(model)}".encode()


def webhook_state(model: str, job_id: bytes) -> bytes:
    return f"whs:{tag(model)}:{job_id.hex()}".encode()


def live_sequences(model: str) -> bytes:
    return f"sl:{tag(model)}".encode()


def sequence_states(model: str) -> bytes:
    return f"st:{tag(model)}".encode()


@lru_cache(maxsize=_REMEMBERED)
def statistics(model: str, version: int, content_hash: str) -> bytes:
    return f"s:{tag(model)}:{version}:{content_hash}".encode()


def usage(model: str, day: int) -> bytes:
    return f"us:{tag(model)}:{day}".encode()


USED_MODELS = b"usm"


def shadow_counts(model: str, version: int) -> bytes:
    return f"sh:{tag(model)}:{version}".encode()


def recorded_call(model: str, call_id: bytes) -> bytes:
    return f"rq:{tag(model)}:{call_id.hex()}".encode()


def recorded_times(model: str) -> bytes:
    return f"rqt:{tag(model)}".encode()


def recorded_sizes(model: str) -> bytes:
    return f"rqu:{tag(model)}".encode()


def release_owner(model: str) -> str:
    """The name in place of a model's under which the judgement of its candidate is owned: no directory has a name with
    a slash, and so no model has it.
    """
    return f"release/{model}"


def batches(executor: str) -> bytes:
    return f"x:{executor}".encode()


def replies(endpoint: str) -> bytes:
    return f"r:{endpoint}".encode()


_ENSEMBLE = "ensemble."


@lru_cache(maxsize=1024)
def ensemble_endpoint(model: str) -> str:
    """Where the steps of an ensemble answer: of the model, not of a process, so that its next owner reads on.

    It is also a name of a directory (`charonia.eventlog.payloads`).
    """
    plain = re.fullmatch(r"[A-Za-z0-9_-]{1,200}", model)
    return _ENSEMBLE + (model if plain else "." + hashlib.blake2b(model.encode(), digest_size=16).hexdigest())


def is_standing(endpoint: str) -> bool:
    """Whether an endpoint belongs to no process: it does not go when one ends."""
    return endpoint.startswith(_ENSEMBLE)


@lru_cache(maxsize=4096)
def counts_its_requests(endpoint: str) -> bool:
    """Whether who waits there counts what becomes of its requests (M1): gateways do, ensembles and models do not."""
    return bool(endpoint) and not endpoint.startswith((_ENSEMBLE, "executor-"))


def waiting(batcher: str) -> bytes:
    return f"wf:{batcher}".encode()


def turns(executor: str) -> bytes:
    return f"wr:{executor}".encode()


def open_streams(gateway: str) -> bytes:
    return f"os:{gateway}".encode()


def alive(role: str, incarnation: str) -> bytes:
    return f"alive:{role}:{incarnation}".encode()


def blob(blob_id: str) -> bytes:
    return f"blob:{blob_id}".encode()


def trace_count(generation: str) -> bytes:
    return f"tc:{generation}".encode()


LENDERS = b"bl"


def lent(incarnation: str) -> bytes:
    return f"bl:{incarnation}".encode()


CACHE_USES = b"cu:{cache}"
CACHE_EXPIRIES = b"ce"


def cached(digest: bytes) -> bytes:
    return f"c:{digest.hex()}".encode()


BATCHES_ACTIVE = b"oba"
BATCHES_EXPIRING = b"obx"


def stored_file(file_id: str) -> bytes:
    return f"of:{file_id}".encode()


def stored_files(tenant: str) -> bytes:
    return f"ofl:{quote(tenant, safe='-_.~ ')}".encode()


def ending_files(tenant: str) -> bytes:
    return f"ofl:e:{quote(tenant, safe='-_.~ ')}".encode()


def batch_facts(batch_id: str) -> bytes:
    return f"ob:{batch_id}".encode()


def batch_fence(batch_id: str) -> bytes:
    """In the slot of `batch_facts`; its name begins alike, so that rights to those are enough."""
    return f"ob:{{ob:{batch_id}}}".encode()


def batch_results(batch_id: str) -> bytes:
    return f"obr:{batch_id}".encode()


def batch_progress(batch_id: str) -> bytes:
    return f"obp:{batch_id}".encode()


def stored_batches(tenant: str) -> bytes:
    return f"obl:{quote(tenant, safe='-_.~ ')}".encode()


def batch_owner(batch_id: str) -> str:
    """The name in place of a model's under which a batch is owned: no model is loaded under it."""
    return f"openai.{batch_id}"


def sizes(key: bytes) -> bytes:
    """Beside a set of `Notes.keep_recent`, whose name has a hash tag: its members' sizes."""
    return key + b":sizes"
