"""Progress of requests of resumable models: appended by the current attempt alone, each record at its own place."""

from __future__ import annotations

from log_adapters import NO_LIMITS, Subject

from charonia import keys
from charonia.eventlog.port import FENCED, OTHERWISE, ProgressPart, Reply
from charonia.eventlog.redis.cluster.cluster_log import ClusterLog
from charonia.facts.jobs import JobEnd, JobState, NewJob

M = "m"
IDS = [bytes(15) + bytes([n]) for n in range(4)]
OTHERS = [b"x" * 15 + bytes([n]) for n in (7, 200, 3)]


async def accepted(subject: Subject, ids: list[bytes] = IDS, tenant: str = "") -> int:
    """Accept requests in one entry; returns the token of their owner."""
    await subject.log.accept(M, 0, 0, [(one, 1) for one in ids], [b"r", b"x"], NO_LIMITS, tenant=tenant)
    owner, token = await subject.log.owner(M)
    return token if owner else await subject.log.take_ownership(M, "owner", "")


async def test_records_are_appended_at_their_own_places(subject: Subject) -> None:
    log = subject.log
    await accepted(subject)
    parts = [ProgressPart(IDS[0], 1, 0, [b"a", b"\0\xff"]), ProgressPart(IDS[2], 1, 0, [b""])]
    assert await log.append_progress(M, parts) == [2, 1]
    assert await log.append_progress(M, [ProgressPart(IDS[0], 1, 2, [b"c"])]) == [3]
    assert await subject.peer.progress(M, [IDS[2], IDS[1], IDS[0]]) == [[b""], [], [b"a", b"\0\xff", b"c"]]
    assert sorted(await subject.peer.progress_ids(M)) == [IDS[0], IDS[2]]
    assert await log.append_progress(M, []) == []
    assert await log.progress(M, []) == []


async def test_what_was_appended_before_is_not_appended_again(subject: Subject) -> None:
    log = subject.log
    await accepted(subject)
    await log.append_progress(M, [ProgressPart(IDS[0], 1, 0, [b"a", b"b"])])
    assert await log.append_progress(M, [ProgressPart(IDS[0], 1, 0, [b"a", b"b"])]) == [2]
    assert await log.append_progress(M, [ProgressPart(IDS[0], 1, 1, [b"b", b"c"])]) == [3]
    assert await log.append_progress(M, [ProgressPart(IDS[0], 1, 1, [b"b"])]) == [3]
    assert await log.append_progress(M, [ProgressPart(IDS[0], 1, 2, [b"x", b"d"])]) == [OTHERWISE]
    assert await log.append_progress(M, [ProgressPart(IDS[0], 1, 5, [b"f"])]) == [3], "those before are missing"
    assert await log.progress(M, [IDS[0]]) == [[b"a", b"b", b"c"]]


async def test_a_later_attempt_fences_the_earlier_one(subject: Subject) -> None:
    log = subject.log
    token = await accepted(subject)
    await accepted(subject, OTHERS, "tenant")
    for one in (IDS[1], OTHERS[1]):
        assert await log.append_progress(M, [ProgressPart(one, 1, 0, [b"a"])]) == [1]
        assert await log.begin_attempt(M, token, [one], 2) == [True]
        late, next_one = ProgressPart(one, 1, 1, [b"late"]), ProgressPart(one, 2, 1, [b"b"])
        assert await log.append_progress(M, [late, next_one]) == [FENCED, 2]
        assert await log.append_progress(M, [ProgressPart(one, 1, 0, [b"a"])]) == [FENCED], "also what it knows"
        assert await log.progress(M, [one]) == [[b"a", b"b"]]
    assert await log.append_progress(M, [ProgressPart(IDS[2], 1, 0, [b"c"])]) == [1], "others of the entry go on"


async def test_replies_go_with_the_records_or_not_at_all(subject: Subject) -> None:
    """Or, in a cluster, always apart."""
    log = subject.log
    await accepted(subject)
    streams = [keys.replies(name) for name in ("one", "two")]
    replies = [Reply(streams[0], [b"r", b"x", b"r", b"\0\xff"]), Reply(streams[1], [b"r", b"y"])]
    parts = [ProgressPart(IDS[0], 1, 0, [b"a", b"b"]), ProgressPart(IDS[1], 1, 0, [b"c"])]
    lengths, sent = await log.append_progress_and_replies(M, parts, replies)
    assert lengths == [2, 1]
    found = [[list(map(bytes, entry.fields)) for entry in await log.range(stream)] for stream in streams]
    assert found == ([[replies[0].fields], [replies[1].fields]] if sent else [[], []])
    assert sent == (not isinstance(log, ClusterLog))
    # again, as when no answer came: its readers know each place
    assert await log.append_progress_and_replies(M, parts, replies) == ([2, 1], sent)
    for wrong, answer in (
        (ProgressPart(IDS[0], 1, 1, [b"other", b"c"]), OTHERWISE),
        (ProgressPart(IDS[0], 1, 5, [b"f"]), 2),
        (ProgressPart(b"?" * 16, 1, 0, [b"a"]), FENCED),
    ):
        part = ProgressPart(IDS[2], 1, 0, [b"d"])
        before = len(await log.range(streams[1]))
        assert await log.append_progress_and_replies(M, [wrong, part], replies) == ([answer, 1], False)
        assert len(await log.range(streams[1])) == before
    assert await log.append_progress_and_replies(M, parts, []) == ([2, 1], False)
    assert await log.append_progress_and_replies(M, [], replies) == ([], False)


async def test_nothing_is_kept_of_settled_and_unknown_requests(subject: Subject) -> None:
    log = subject.log
    token = await accepted(subject)
    await accepted(subject, OTHERS, "tenant")
    every = [*IDS, *OTHERS]
    assert await log.append_progress(M, [ProgressPart(one, 1, 0, [b"a"]) for one in every]) == [1] * 7
    assert await log.begin_attempt(M, token, [IDS[3]], 2) == [True]
    assert await log.settle(M, [(IDS[0], 1), (IDS[3], 1), (OTHERS[1], 9)], None, []) == [True, False, True]
    late = [ProgressPart(one, 9, 1, [b"b"]) for one in (IDS[0], OTHERS[1], b"?" * 16)]
    assert await log.append_progress(M, late) == [FENCED] * 3
    assert await log.progress(M, every) == [[], [b"a"], [b"a"], [b"a"], [b"a"], [], [b"a"]]
    left = [IDS[1], IDS[2], IDS[3], OTHERS[0], OTHERS[2]]
    assert sorted(await log.progress_ids(M)) == sorted(left)
    assert all(await log.settle(M, [(one, 9) for one in left], None, []))
    assert await log.progress_ids(M) == []
    assert await log.progress(M, every) == [[]] * 7


async def test_a_group_that_is_settled_as_a_whole_keeps_nothing(subject: Subject) -> None:
    await accepted(subject)
    await subject.log.append_progress(M, [ProgressPart(one, 1, 0, [b"a"]) for one in IDS])
    assert all(await subject.log.settle(M, [(one, 1) for one in IDS], None, []))
    assert await subject.log.progress_ids(M) == []
    assert await subject.log.progress(M, IDS) == [[]] * 4


async def test_the_progress_of_a_job_goes_with_its_end(subject: Subject) -> None:
    job = NewJob(b"j" * 16, 10, accepted_us=5, retention_s=60)
    await subject.log.accept_job(M, 0, 0, job, [b"r", b"x"], NO_LIMITS)
    assert await subject.log.append_progress(M, [ProgressPart(job.id, 1, 0, [b"a"])]) == [1]
    assert await subject.log.add_job_responses(M, job.id, 1, 0, [b"zero"])
    end = {job.id: JobEnd(JobState.SUCCEEDED, b"result", {})}
    assert await subject.log.settle(M, [(job.id, 1)], None, [], ends=end) == [True]
    assert await subject.log.progress_ids(M) == []
    assert await subject.log.job_responses(M, job.id) == [(1, 0, b"zero")]


async def test_many_records_and_requests_at_once(subject: Subject) -> None:
    many = [bytes(14) + n.to_bytes(2, "big") for n in range(1500)]
    await subject.log.accept(M, 0, 0, [(one, 1) for one in many], [b"r", b"x"], NO_LIMITS)
    assert await subject.log.append_progress(M, [ProgressPart(one, 1, 0, [one]) for one in many]) == [1] * 1500
    records = [b"%d" % n for n in range(1, 9001)]
    assert await subject.log.append_progress(M, [ProgressPart(many[0], 1, 1, records)]) == [9001]
    assert (await subject.log.progress(M, many))[0][1:] == records
    assert all(await subject.log.settle(M, [(one, 1) for one in many], None, []))
    assert await subject.log.progress_ids(M) == []


async def test_what_an_older_release_left_can_be_dropped(subject: Subject) -> None:
    await accepted(subject)
    await subject.log.append_progress(M, [ProgressPart(one, 1, 0, [b"a"]) for one in IDS])
    await subject.log.drop_progress(M, [IDS[0], b"?" * 16])
    await subject.log.drop_progress(M, [])
    assert sorted(await subject.log.progress_ids(M)) == IDS[1:]
    assert await subject.log.progress(M, IDS[:2]) == [[], [b"a"]]
