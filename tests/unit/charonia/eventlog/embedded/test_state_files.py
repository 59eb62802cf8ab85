"""What the files of a state directory say, and what is remembered beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from charonia.eventlog.embedded.state_files import StateFiles, Writer


@pytest.fixture
def files(tmp_path: Path) -> StateFiles:
    (tmp_path / "appendonlydir").mkdir()
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text(
        "file appendonly.aof.2.base.rdb seq 2 type b\nfile appendonly.aof.3.incr.aof seq 3 type i\n"
    )
    return StateFiles(tmp_path)


def snapshot(files: StateFiles, head: bytes) -> None:
    (files.append_directory / "appendonly.aof.2.base.rdb").write_bytes(head)


@pytest.mark.parametrize(
    ("head", "format", "writer"),
    [
        (b"REDIS0010\xfa\tredis-ver\x067.0.15\xfa\nredis-bits", "REDIS0010", Writer("Redis", "7.0.15")),
        (b"VALKEY080\xfa\nvalkey-ver\x059.1.2\xfa", "VALKEY080", Writer("Valkey", "9.1.2")),
        (b"REDIS0011\xff", "REDIS0011", None),
        (b"", "", None),
        (b"*3\r\n$3\r\nSET\r\n", "", None),
    ],
)
def test_a_snapshot_names_its_format_and_its_writer(
    files: StateFiles, head: bytes, format: str, writer: Writer | None
) -> None:
    snapshot(files, head)
    assert (files.exist, files.format, files.saved_by, files.writer) == (True, format, writer, writer)
    assert files.last == files.append_directory / "appendonly.aof.3.incr.aof"


def test_an_empty_directory_has_no_state(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    assert (files.exist, files.format, files.writer, files.last, files.size_bytes) == (False, "", None, None, 0)


def test_the_program_that_used_it_last_is_remembered(files: StateFiles) -> None:
    snapshot(files, b"REDIS0010\xfa\tredis-ver\x067.0.15\xfa")
    files.remember(Writer("Valkey", "9.1.2", "/bin/valkey-server"))
    assert files.writer == Writer("Valkey", "9.1.2", "/bin/valkey-server")
    written = (files.directory / "server.json").read_text()
    assert json.loads(written)["format"] == "REDIS0010"
    files.remember(Writer("Valkey", "9.1.2", "/bin/valkey-server"))
    assert (files.directory / "server.json").read_text() == written, "since when is that of the first time"


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"program": 1}', "\x00", "[" * 100_000])
def test_a_record_that_cannot_be_read_is_none(files: StateFiles, record: str) -> None:
    snapshot(files, b"REDIS0010\xfa\tredis-ver\x067.0.15\xfa")
    (files.directory / "server.json").write_text(record)
    assert files.writer == Writer("Redis", "7.0.15")


def test_an_orderly_end_is_one_until_the_file_changes(files: StateFiles) -> None:
    last = files.append_directory / "appendonly.aof.3.incr.aof"
    last.write_bytes(b"*1\r\n")
    assert not files.stopped_in_order()
    files.stopped()
    assert files.stopped_in_order()
    last.write_bytes(b"*1\r\n$")
    assert not files.stopped_in_order()
