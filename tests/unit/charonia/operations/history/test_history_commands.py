"""`charonia audit --verify` and `--export` on a log in memory."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batcher.housekeeping.journal_sealing import JournalSealing
from charonia import keys
from charonia.errors import InvalidArgument, NotFound, StartupError
from charonia.facts.jobs import JobState
from charonia.facts.journal import FIELD
from charonia.operations.history import fact_files

Ids = Callable[[int], bytes]


async def live(yard: Any, *request_ids: bytes) -> None:
    for request_id in request_ids:
        await yard.job(request_id)
        await yard.begin(request_id)
        await yard.end(request_id)


async def seal(yard: Any) -> None:
    sealing = JournalSealing(yard.log, "m")
    while await sealing.seal():
        pass


# -- verify ------------------------------------------------------------------------------------------------------------


async def test_an_intact_chain_is_reported_with_what_is_not_sealed_yet(yard: Any, ids: Ids) -> None:
    await live(yard, ids(1), ids(2))
    await seal(yard)
    await live(yard, ids(3))
    document, well, shown = await yard.run("audit", "--verify")
    idle, model = document["models"]
    assert (well, idle["model"], idle["last_seal"], model["sealed"], model["unsealed"]) == (True, "idle", 0, 6, 3)
    assert "idle: nothing is sealed, 0 not sealed yet" in shown
    assert f"m: intact, 6 entries from {model['from']} to {model['to']} in seals 1 to 1, 3 not sealed yet" in shown
    assert shown.endswith("\nintact\n")


async def test_a_changed_entry_is_named_with_what_was_expected(yard: Any, ids: Ids) -> None:
    await live(yard, ids(1))
    await seal(yard)
    await live(yard, ids(2))
    await seal(yard)
    entries = await yard.log.range(keys.journal("m"))
    entries[4].fields[1] = bytes(entries[4].fields[1]) + b"\x00"
    document, well, shown = await yard.run("audit", "--verify", "--model", "m")
    (model,) = document["models"]
    broken = model["broken"]
    assert (well, document["intact"], model["sealed"]) == (False, False, 3)
    assert (broken["fault"], broken["seal"]) == ("entries_changed", 2)
    assert (broken["first"], broken["last"]) == (entries[3].id.decode(), entries[5].id.decode())
    assert broken["expected"].startswith(f"3 entries from {broken['first']} with the digest ")
    assert broken["found"] != broken["expected"]
    assert "m: BROKEN at seal 2: entries were changed after they were sealed" in shown
    assert shown.endswith("not intact\n")


async def test_trimming_while_it_is_verified_is_no_fault(yard: Any, ids: Ids, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        await live(yard, ids(number))
        await seal(yard)
    await yard.log.set_retention("m", size_bytes=0, journal_s=0, journal_size_bytes=1)
    entries = await yard.log.range(keys.journal("m"))
    read, seen = yard.log.range, 0

    async def with_trimming(stream: bytes, after: bytes = b"0-0", count: int = 1000) -> Any:
        nonlocal seen
        if stream == keys.journal("m") and count > 1:
            seen += 1
            if seen == 2:  # the seals and a part of the third one's entries are read
                assert await yard.log.trim_journal("m", entries[14].id, sealed=True) == 12
        return await read(stream, after, min(count, 8))

    monkeypatch.setattr(yard.log, "range", with_trimming)
    document, well, _ = await yard.run("audit", "--verify", "--model", "m")
    (model,) = document["models"]
    assert seen >= 2
    assert (well, model["sealed"], model["last_seal"]) == (True, 6, 6)
    assert (model["first_seal"], model["from"]) == (4, entries[12].id.decode())


async def test_heads_are_added_to_a_file_and_compared_with_it(yard: Any, ids: Ids, tmp_path: Path) -> None:
    file = tmp_path / "heads.jsonl"
    await live(yard, ids(1))
    await seal(yard)
    document, _, shown = await yard.run("audit", "--verify", "--heads", str(file))
    assert (document["heads_added"], "1 heads added to the file" in shown) == (1, True)
    assert (await yard.run("audit", "--verify", "--heads", str(file)))[0]["heads_added"] == 0
    await live(yard, ids(2))
    await seal(yard)
    file.write_text(file.read_text().rstrip())  # as an editor may leave it
    document, well, _ = await yard.run("audit", "--verify", "--heads", str(file))
    assert (well, document["heads_added"], document["models"][1]["compared"]) == (True, 1, 1)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["model"], line["seal"]) for line in lines] == [("m", 1), ("m", 2)]
    assert lines[-1]["link"] == document["models"][1]["head"]

    # who may write to the log makes a chain of another history
    for stream in (keys.journal("m"), keys.journal_seals("m")):
        await yard.log.delete_stream(stream)
    await live(yard, ids(3))
    await seal(yard)
    assert (await yard.run("audit", "--verify"))[1]
    before = file.read_text()
    document, well, shown = await yard.run("audit", "--verify", "--heads", str(file))
    assert (well, document["models"][1]["broken"]["fault"]) == (False, "head_differs")
    assert (document["heads_added"], file.read_text()) == (0, before)

    # or deletes the model
    for stream in (keys.journal("m"), keys.journal_seals("m"), keys.CONTROL, keys.queue("m", 0)):
        await yard.log.delete_stream(stream)
    document, well, _ = await yard.run("audit", "--verify", "--heads", str(file))
    assert (well, document["models"][-1]["broken"]["fault"]) == (False, "head_lost")


async def test_heads_that_are_trimmed_connect_nothing(yard: Any, ids: Ids, tmp_path: Path) -> None:
    file = tmp_path / "heads.jsonl"
    await live(yard, ids(1))
    await seal(yard)
    assert (await yard.run("audit", "--verify", "--heads", str(file)))[1]
    for number in (2, 3):
        await live(yard, ids(number))
        await seal(yard)
    await yard.log.set_retention("m", size_bytes=0, journal_s=0, journal_size_bytes=1)
    assert await yard.log.trim_journal("m", b"+", sealed=True) == 9
    assert (await yard.run("audit", "--verify"))[1]
    document, well, _ = await yard.run("audit", "--verify", "--heads", str(file))
    assert (well, document["models"][1]["broken"]["fault"]) == (False, "head_trimmed")


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("nonsense\n", "line 1 of '.*' is no head"),
        ('{"model": "m", "seal": 1, "entry": "1-0", "link": "ab", "sealed": "2026-01-01T00:00:00Z"}', "no head"),
        ("[1]", "no head"),
    ],
)
async def test_a_file_that_holds_no_heads_is_refused(yard: Any, tmp_path: Path, told: str, said: str) -> None:
    file = tmp_path / "heads.jsonl"
    file.write_text(told)
    with pytest.raises(InvalidArgument, match=said):
        await yard.run("audit", "--verify", "--heads", str(file))
    with pytest.raises(InvalidArgument, match="cannot be read"):
        await yard.run("audit", "--verify", "--heads", str(tmp_path))


async def test_what_stays_unsealed_is_late_on_demand(yard: Any, ids: Ids, monkeypatch: pytest.MonkeyPatch) -> None:
    await live(yard, ids(1))
    since = (await yard.log.range(keys.journal("m")))[0].id
    now_ns = int(since.partition(b"-")[0]) * 1_000_000 + 60_000_000_000
    monkeypatch.setattr("charonia.operations.command_line.wall_ns", lambda: now_ns)
    assert (await yard.run("audit", "--verify", "--max-unsealed", "61s"))[1]
    document, well, shown = await yard.run("audit", "--verify", "--max-unsealed", "59s")
    assert (well, [model["late"] for model in document["models"]]) == (False, [False, True])
    assert f"LATE: {since.decode()} is not sealed" in shown


async def test_an_unknown_model_is_no_intact_one(yard: Any, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        await yard.run("audit", "--verify", "--model", "typo")
    with pytest.raises(NotFound):
        await yard.run("audit", "--export", str(tmp_path / "facts.jsonl"), "--model", "typo")
    assert os.listdir(tmp_path) == []


# -- export ------------------------------------------------------------------------------------------------------------


async def facts(yard: Any, ids: Ids) -> list[dict[str, Any]]:
    """The rows that an export of a small journal has to have."""
    await yard.requests(ids(1), ids(2), journalled=True)
    await yard.begin(ids(1))
    await yard.end(ids(1))
    await yard.end(ids(2), JobState.CANCELLED)
    accepted, batched, ended, cancelled = await yard.log.range(keys.journal("m"))
    nothing = {"model": "m", "attempt": None, "outcome": None, "executor": None, "batch": None}
    ran = {"attempt": 1, "executor": "executor-1", "batch": "b1"}
    one, two = {**nothing, "request": ids(1).hex()}, {**nothing, "request": ids(2).hex()}
    return [
        one | {"entry": accepted.id.decode(), "kind": "accepted"},
        two | {"entry": accepted.id.decode(), "kind": "accepted"},
        one | {"entry": batched.id.decode(), "kind": "batched", **ran},
        one | {"entry": ended.id.decode(), "kind": "ended", "outcome": "succeeded"},
        two | {"entry": cancelled.id.decode(), "kind": "ended", "outcome": "cancelled"},
    ]


async def test_facts_are_exported_as_json_lines(yard: Any, ids: Ids, tmp_path: Path) -> None:
    expected, file = await facts(yard, ids), tmp_path / "facts.jsonl"
    document, well, shown = await yard.run("audit", "--export", str(file))
    assert (well, document["facts"], document["bytes"]) == (True, 5, file.stat().st_size)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [list(row) for row in rows] == [list(fact_files.Row._fields)] * 5
    times = [row.pop("time") for row in rows]
    assert rows == expected
    assert all(time.endswith("Z") and len(time) == len("2026-11-23T12:00:00.123Z") for time in times)
    assert "m: 5 facts of 4 entries" in shown
    assert os.listdir(tmp_path) == ["facts.jsonl"]

    with pytest.raises(InvalidArgument, match="--overwrite"):
        await yard.run("audit", "--export", str(file))
    twice = ("--model", "m", "--model", "m")
    assert (await yard.run("audit", "--export", str(file), "--overwrite", *twice))[0]["facts"] == 5
    assert len((await yard.run("audit", "--verify", *twice))[0]["models"]) == 1
    assert (await yard.run("audit", "--export", str(file), "--overwrite", "--model", "idle"))[0]["facts"] == 0
    assert file.read_bytes() == b""


async def test_facts_are_exported_as_parquet(
    yard: Any, ids: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (extra `parquet`)")
    monkeypatch.setattr(fact_files, "ROWS_OF_GROUP", 2)
    expected, file = await facts(yard, ids), tmp_path / "facts.parquet"
    document, _, _ = await yard.run("audit", "--export", str(file))
    table = parquet.read_table(file)
    assert (document["facts"], parquet.ParquetFile(file).num_row_groups) == (5, 3)
    assert table.schema.names == list(fact_files.Row._fields)
    assert str(table.schema.field("time").type) == "timestamp[ms, tz=UTC]"
    rows = table.to_pylist()
    times = [int(row.pop("time").timestamp() * 1000 + 0.5) for row in rows]
    assert rows == expected
    assert times == [int(row["entry"].partition("-")[0]) for row in expected]

    await yard.run("audit", "--export", str(file), "--overwrite", "--model", "idle")
    assert parquet.read_table(file).num_rows == 0


async def test_a_span_of_time_is_exported(yard: Any, ids: Ids, tmp_path: Path) -> None:
    for at_ms in range(1000, 9000, 1000):
        number = at_ms << 20
        yard.log._append_at(keys.journal("m"), number, [FIELD, b"\x92\x00\xc4\x11\x00" + ids(at_ms)])
    file = tmp_path / "facts.jsonl"
    words = ["audit", "--export", str(file), "--since", "1970-01-01T00:00:03Z", "--until", "1970-01-01T00:00:06Z"]
    document, _, _ = await yard.run(*words)
    assert [json.loads(line)["entry"] for line in file.read_text().splitlines()] == ["3000-0", "4000-0", "5000-0"]
    assert document["models"][1]["entries"] == 3
    with pytest.raises(InvalidArgument, match="earlier"):
        await yard.run(*words[:-1], "1970-01-01T00:00:02Z", "--overwrite")


async def test_unreadable_entries_are_named(yard: Any, ids: Ids, tmp_path: Path) -> None:
    await facts(yard, ids)
    bad = await yard.log.append(keys.journal("m"), [FIELD, b"\xc1"])
    await yard.log.append(keys.journal("m"), [FIELD, b"\x92\x63\xc0"])
    document, well, shown = await yard.run("audit", "--export", str(tmp_path / "facts.jsonl"))
    model = document["models"][1]
    assert (well, model["unreadable_entries"], model["skipped"], model["facts"]) == (False, [bad.decode()], 1, 5)
    assert f"1 entries cannot be read: {bad.decode()}" in shown


async def test_what_cannot_be_written_is_refused_and_leaves_nothing(
    yard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, said in (("facts.csv", "ends with .jsonl or .parquet"), ("none/facts.jsonl", "cannot be written")):
        with pytest.raises(InvalidArgument, match=said):
            await yard.run("audit", "--export", str(tmp_path / name))
    imported = builtins.__import__

    def without_pyarrow(name: str, *about: Any, **more: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return imported(name, *about, **more)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(StartupError, match=r"pip install 'charonia\[parquet\]'"):
        await yard.run("audit", "--export", str(tmp_path / "facts.parquet"))
    monkeypatch.undo()
    monkeypatch.setattr("charonia.operations.history.history_commands.rows_of", None)
    await yard.log.append(keys.journal("m"), [FIELD, b"\xc1"])
    with pytest.raises(TypeError):
        await yard.run("audit", "--export", str(tmp_path / "facts.jsonl"))
    assert os.listdir(tmp_path) == []
