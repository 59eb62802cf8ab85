"""State directories and the server programs that read them: the wheel's Valkey, and Redis 7.0 where it is."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from charonia.errors import StartupError
from charonia.eventlog.embedded import PrivateServer, ServerBinary, find_server, wheel_binary
from charonia.eventlog.embedded.state_files import StateFiles

pytestmark = pytest.mark.integration

WRITES = 200


@pytest.fixture
def state_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="charonia-test-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def valkey() -> ServerBinary:
    return find_server(wheel_binary())


@pytest.fixture
def redis_7() -> ServerBinary:
    """Another program, which does not read what Valkey 9 writes."""
    path = shutil.which("redis-server")
    if path is None:
        pytest.skip("redis-server is not installed")
    program = find_server(path)
    if program.name != "Redis" or program.version >= (7, 2):
        pytest.skip("redis-server is no Redis 7.0")
    return program


def use(state_dir: Path, program: ServerBinary | None = None, *, rewrite: bool = False) -> ServerBinary:
    """Start a server on the directory, count its starts in it, stop it; the program that it was."""
    server = PrivateServer(state_dir, program)
    server.start()
    try:
        server.wait_ready()
        with redis.Redis.from_url(server.url) as client:
            client.incr("starts")
            if rewrite:
                client.bgrewriteaof()
                while client.info("persistence")["aof_rewrite_in_progress"]:
                    time.sleep(0.001)
    finally:
        server.stop()
    writer = server.files.writer
    assert writer is not None
    return ServerBinary(writer.path, tuple(int(part) for part in writer.version.split(".")), writer.name)


@pytest.mark.parametrize("first", ["valkey", "redis_7"])
def test_the_program_that_wrote_a_state_is_preferred(
    state_dir: Path, valkey: ServerBinary, redis_7: ServerBinary, first: str
) -> None:
    """Whichever program stands first on PATH, and without a record as well."""
    writer, other = (valkey, redis_7) if first == "valkey" else (redis_7, valkey)
    assert use(state_dir, writer) == writer
    assert json.loads((state_dir / "server.json").read_text())["program"] == writer.name
    with pytest.MonkeyPatch.context() as patch:
        (state_dir / "bin").mkdir()
        (state_dir / "bin" / "valkey-server").symlink_to(other.path)  # where the product looks first
        (state_dir / "bin" / "redis-server").symlink_to(writer.path)
        patch.setenv("PATH", str(state_dir / "bin"))
        assert find_server().name == other.name
        assert use(state_dir) == writer
        (state_dir / "server.json").unlink()
        assert use(state_dir).name == writer.name


def test_a_program_that_cannot_read_a_state_is_refused_with_what_to_do(
    state_dir: Path, valkey: ServerBinary, redis_7: ServerBinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(state_dir, valkey)
    before = {path: path.read_bytes() for path in (state_dir / "appendonlydir").iterdir()}
    with pytest.raises(StartupError) as refused:
        find_server(redis_7.path, StateFiles(state_dir))
    said = str(refused.value)
    assert f"the state in '{state_dir}' was written by {valkey.writer.text}, file format VALKEY080" in said
    assert f"cannot be read by {redis_7.text}" in said
    assert "start with --log-server=" in said
    assert f"'charonia state export FILE --state-dir={state_dir}'" in said

    monkeypatch.setattr("charonia.eventlog.embedded.programs.wheel_binary", lambda: None)
    monkeypatch.setenv("PATH", str(Path(redis_7.path).parent))
    (state_dir / "server.json").unlink()
    with pytest.raises(StartupError, match=r"install a Valkey of version 9\.[\d.]+ or newer") as refused:
        PrivateServer(state_dir).start()
    assert "state export" in str(refused.value)
    assert before == {path: path.read_bytes() for path in (state_dir / "appendonlydir").iterdir()}, (
        "nothing was touched"
    )


def test_a_newer_program_takes_over_and_is_remembered(
    state_dir: Path, valkey: ServerBinary, redis_7: ServerBinary
) -> None:
    """Until the files are rewritten in its format the older one reads them, too; then it is refused."""
    use(state_dir, redis_7)
    assert use(state_dir, find_server(valkey.path, StateFiles(state_dir)), rewrite=True) == valkey
    with pytest.raises(StartupError, match=r"cannot be read by Redis 7\.0"):
        find_server(redis_7.path, StateFiles(state_dir))
    assert use(state_dir).name == "Valkey"


# -- unfinished ends ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["valkey", "redis_7"])
def torn(request: pytest.FixtureRequest, state_dir: Path) -> tuple[PrivateServer, Path]:
    """A server that was killed after it had written, and the file that it appended to."""
    server = PrivateServer(state_dir, request.getfixturevalue(request.param))
    server.start()
    server.wait_ready()
    with redis.Redis.from_url(server.url) as client:
        for number in range(WRITES):
            client.set(f"key{number}", number)
        with client.pipeline(transaction=True) as pipeline:
            pipeline.set("a", "1").set("b", "2").execute()
        while client.info("persistence")["aof_buffer_length"]:  # it postpones writes while the disk is busy
            time.sleep(0.001)
    server.process.kill()
    server.process.wait()
    last = server.files.last
    assert last is not None
    return server, last


def counted(server: PrivateServer) -> int:
    server.start()
    try:
        server.wait_ready()
        with redis.Redis.from_url(server.url) as client:
            return int(client.dbsize())
    finally:
        server.stop()


def test_a_whole_file_is_not_touched(torn: tuple[PrivateServer, Path]) -> None:
    server, _ = torn
    assert counted(server) == WRITES + 2
    assert server.repaired is None


@pytest.mark.parametrize("zeros", [0, 5000])
def test_an_unfinished_write_is_cut_off_kept_and_reported(torn: tuple[PrivateServer, Path], zeros: int) -> None:
    server, last = torn
    content = last.read_bytes()
    at = content.index(b"*1\r\n$5\r\nMULTI")
    cut = content.index(b"$1\r\nb", at) + 3
    last.write_bytes(content[:cut] + bytes(zeros))
    assert counted(server) == WRITES
    done = server.repaired
    assert done is not None
    assert (done.offset, done.lost_bytes) == (at, cut - at + zeros)
    assert [word.split(" (")[0] for word in done.writes] == ["MULTI", "SET a", "SET"]
    assert Path(done.kept).read_bytes() == content[at:cut] + bytes(zeros)
    assert Path(done.kept).stat().st_mode & 0o077 == 0
    report = json.loads(Path(done.kept).with_suffix(".json").read_text())
    assert (report["offset"], report["lost_bytes"], report["lost"]) == (at, done.lost_bytes, list(done.writes))
    assert f"its last {done.lost_bytes} bytes, from byte {at} of {last.name} on, were cut off" in done.text
    assert counted(server) == WRITES
    assert server.repaired is None, "it ended in order since"


def test_damage_before_the_end_is_refused_and_nothing_is_cut(torn: tuple[PrivateServer, Path]) -> None:
    server, last = torn
    content = bytearray(last.read_bytes())
    at = content.index(b"*3\r\n$3\r\nSET\r\n$4\r\nkey9\r\n")
    content[at] = 0
    last.write_bytes(content)
    with pytest.raises(StartupError, match=rf"is damaged at byte {at} of {len(content)}, and whole writes may follow"):
        server.start()
    assert last.read_bytes() == content
