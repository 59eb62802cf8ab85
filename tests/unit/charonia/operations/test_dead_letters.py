"""`charonia dlq` on a log in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia import keys
from charonia.errors import NotFound
from charonia.facts.jobs import parse_public_id
from charonia.operations.dead_letters import choose, read_letters
from charonia.wire import records_of, unpack_request

Ids = Callable[[int], bytes]


async def test_ls_lists_letters_of_all_models_or_of_one(yard: Any, ids: Ids) -> None:
    await yard.letter(ids(1))
    await yard.letter(ids(2), job=True)
    document, _, shown = await yard.run("dlq", "ls")
    assert [(row["id"], row["attempts"], row["age_s"]) for row in document["letters"]] == [
        (ids(1).hex(), 3, 60.0),
        (ids(2).hex(), 3, 60.0),
    ]
    assert [row["job"] for row in document["letters"]] == [None, f"{ids(2).hex()}.m"]
    assert "the instance died" in shown
    assert (await yard.run("dlq", "ls", "idle"))[0]["letters"] == []
    document, _, shown = await yard.run("dlq", "ls", "m", "--limit", "1")
    assert (len(document["letters"]), document["more"]) == (1, True)


@pytest.mark.parametrize("named", ["m {id}", "{id}.m"])
async def test_show_prints_inputs_error_and_stderr(yard: Any, ids: Ids, named: str) -> None:
    await yard.letter(ids(1))
    document, _, shown = await yard.run("dlq", "show", *named.format(id=ids(1).hex()).split())
    assert document["inputs"][0] == {
        "name": "X",
        "datatype": "FP32",
        "shape": [1, 12],
        "data": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        "elements": 12,
        "bytes": 48,
    }
    assert document["inputs"][1]["data"] == ["text", {"hex": "ff00"}]
    assert document["stderr"] == ["line one", "Segmentation fault"]
    assert (document["tenant"], document["error"]) == ("acme", "the instance died")
    assert "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0] ..." in shown
    assert "Segmentation fault" in shown
    json.dumps(document)


async def test_show_writes_inputs_as_files(yard: Any, ids: Ids, tmp_path: Path) -> None:
    await yard.letter(ids(1))
    document, _, _ = await yard.run("dlq", "show", "m", ids(1).hex(), "--out", str(tmp_path))
    assert document["files"] == [str(tmp_path / "X.npy"), str(tmp_path / "S.json")]
    assert np.load(tmp_path / "X.npy").tolist() == [list(range(12))]
    assert json.loads((tmp_path / "S.json").read_text()) == {"shape": [1, 2], "data": ["text", {"hex": "ff00"}]}


async def test_replay_submits_the_request_again_as_a_job(yard: Any, ids: Ids) -> None:
    await yard.letter(ids(1))
    document, _, _ = await yard.run("dlq", "replay", "m", ids(1).hex())

    (replayed,) = document["replayed"]
    model, job_id = parse_public_id(replayed["job"]) or ("", b"")
    assert model == "m"
    assert job_id != ids(1)
    job = await yard.log.job("m", job_id)
    assert (job.about["replay_of"], job.tenant, job.retention_s) == (ids(1).hex(), "acme", 86_400)
    (entry,) = await yard.log.range(keys.queue("m", 0, keys.lane_of("acme")))
    (packed,) = records_of(entry.fields)
    record = unpack_request(packed)
    assert (record.id, record.endpoint, record.client_id, record.rows) == (job_id, "", "caller's id", 1)
    assert (record.is_job, record.journalled, record.deadline_ns) == (True, True, 0)
    assert record.inputs()[0].array().tolist() == [list(range(12))]
    assert len((await yard.run("dlq", "ls"))[0]["letters"]) == 1
    _, clean, _ = await yard.run("audit")
    assert clean


async def test_replay_and_drop_take_all_of_a_model(yard: Any, ids: Ids) -> None:
    for number in (1, 2, 3):
        await yard.letter(ids(number))
    document, _, _ = await yard.run("dlq", "replay", "m", "--all", "--retention", "1h")
    assert len({row["job"] for row in document["replayed"]}) == 3
    document, _, _ = await yard.run("dlq", "drop", "m", ids(2).hex())
    assert document["dropped"] == [ids(2).hex()]
    document, _, _ = await yard.run("dlq", "drop", "--all")
    assert document["dropped"] == [ids(1).hex(), ids(3).hex()]
    assert await yard.log.range(keys.dead_letters("m")) == []


async def test_a_letter_that_was_written_twice_is_one(yard: Any, ids: Ids) -> None:
    for _ in range(2):
        await yard.letter(ids(1))
    await yard.letter(ids(2))
    document, _, _ = await yard.run("dlq", "ls")
    assert [row["id"] for row in document["letters"]] == [ids(1).hex(), ids(2).hex()]
    document, _, _ = await yard.run("dlq", "replay", "m", "--all")
    assert [row["id"] for row in document["replayed"]] == [ids(1).hex(), ids(2).hex()]
    await yard.run("dlq", "drop", "m", ids(1).hex())
    assert [row["id"] for row in (await yard.run("dlq", "ls"))[0]["letters"]] == [ids(2).hex()]


class Counting:
    """A log that counts what is read of dead letters."""

    def __init__(self, log: Any) -> None:
        self._log, self.read = log, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def range(self, stream: bytes, after: bytes, count: int) -> Any:
        found = await self._log.range(stream, after, count)
        self.read += len(found)
        return found


async def test_a_list_of_a_tenant_reads_so_many_letters_and_says_where_it_goes_on(yard: Any, ids: Ids) -> None:
    for number in range(1, 8):
        await yard.letter(ids(number), tenant="acme" if number in (4, 7) else "other")
    seen, place, lists = list[str](), None, 0
    while lists < 10:
        rows, place = await read_letters(yard.log, (), 0, 10, "acme", after=place, scan=3)
        seen += [row["id"] for row in rows]
        lists += 1
        if place is None:
            break
    assert (seen, lists) == ([ids(4).hex(), ids(7).hex()], 3)
    rows, place = await read_letters(yard.log, ("m",), 0, 1, "acme")
    assert place is not None
    rows, place = await read_letters(yard.log, ("m",), 0, 1, "acme", after=place)
    assert ([row["id"] for row in rows], place) == ([ids(7).hex()], None)


async def test_a_letter_is_found_by_its_entry_alone_or_among_so_many(yard: Any, ids: Ids) -> None:
    for number in range(1, 8):
        await yard.letter(ids(number))
    last = (await read_letters(yard.log, ("m",), 0, 10))[0][-1]
    log = Counting(yard.log)
    (found,) = await choose(log, "m", (last["entry"],), every=False)
    assert (found.id, log.read) == (ids(7), 1)
    (found,) = await choose(log, "m", (ids(5).hex(),), every=False, scan=5)
    assert found.id == ids(5)
    for text in (ids(6).hex(), "1-0", "0-0", f"{2**63 - 1}-5"):
        with pytest.raises(NotFound, match="is unknown"):
            await choose(log, "m", (text,), every=False, scan=5)


async def test_an_unknown_letter_changes_nothing(yard: Any, ids: Ids) -> None:
    await yard.letter(ids(1))
    for words in (("drop", "m", ids(1).hex(), ids(9).hex()), ("replay", ids(1).hex()), ("show", "m", "x")):
        with pytest.raises(NotFound, match="is unknown"):
            await yard.run("dlq", *words)
    assert len(await yard.log.range(keys.dead_letters("m"))) == 1
    assert await yard.log.lanes("m") == []


async def test_letters_that_cannot_be_read_are_shown_and_not_replayed(yard: Any, ids: Ids) -> None:
    await yard.log.append(keys.dead_letters("m"), [b"r", b"\x07", b"m", b"\xc1"])
    await yard.log.append(keys.dead_letters("m"), [b"z", b""])
    document, _, _ = await yard.run("dlq", "ls")
    entries = [row["entry"] for row in document["letters"]]
    assert len(entries) == 2
    document, _, shown = await yard.run("dlq", "show", "m", entries[0])
    assert "cannot be read" in shown
    with pytest.raises(NotFound, match="no longer has its inputs"):
        await yard.run("dlq", "replay", "m", entries[0])
    assert len((await yard.run("dlq", "drop", "m", *entries))[0]["dropped"]) == 2
