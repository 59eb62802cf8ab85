"""Waves at an executor over the log: answered, settled, and settled as requests where an owner took them apart."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
from executor_bench import Bench, Follower, expected, linear, running, x
from wave_senders import SentWave, send_wave

from batcher.entries.bursting import burst_wave
from charonia import keys
from charonia.facts.events import FIELD_FACT, RequestsEnded, StatisticsWanted, StatisticsWritten, pack_fact
from charonia.tensors import Tensor
from charonia.wire import FIELD_HEADER, FIELD_WAVE, BatchHeader, Wave, unpack_wave, unpack_wave_reply

MODEL = "linear"
ME = "executor-1"


async def sent(bench: Bench, rows: list[np.ndarray]) -> tuple[SentWave, Wave]:
    wave = await send_wave(bench.log, MODEL, [Tensor.of("x", row) for row in rows], "gw")
    (entry,) = await bench.log.range(wave.stream)
    return wave, unpack_wave(entry.fields[1])


async def run(bench: Bench, sent: SentWave, wave: Wave) -> None:
    """Give a wave to the executor; returns when the executor has said that it is done."""
    header = BatchHeader(
        *("b-1", MODEL, 1, "", 1, (1,), keys.facts(MODEL), False, None, ((sent.stream, sent.entry_id),))
    )
    await bench.log.append(keys.batches(ME), [FIELD_HEADER, header.pack(), FIELD_WAVE, wave.record])
    await bench.finished(MODEL, "b-1")


def fenced(bench: Bench) -> int:
    totals = bench.service.metrics._totals.values()
    return sum(one.fenced for one in totals)


async def until_settled(bench: Bench) -> None:
    async with asyncio.timeout(30):
        while await bench.log.unsettled_ids(MODEL):
            await asyncio.sleep(0.001)


async def test_a_wave_is_answered_and_its_entry_deleted(tmp_path: Path) -> None:
    model = tmp_path / MODEL / "1" / "model.onnx"
    linear(model)
    rows = [x(1, seed) for seed in range(3)]
    async with running(tmp_path) as bench:
        wave, read = await sent(bench, rows)
        await run(bench, wave, read)
        replies = Follower(bench.log, keys.replies("gw"))
        await replies.until(lambda: replies.entries)
        (entry,) = replies.entries
        reply = unpack_wave_reply(entry.fields[1])
        assert (reply.prefix, reply.count) == (wave.prefix, 3)
        got = np.frombuffer(reply.columns[0], np.float32).reshape(3, 3)
        np.testing.assert_allclose(got, expected(model, np.concatenate(rows)), rtol=1e-5, atol=1e-5)
        assert await bench.log.range(wave.stream) == []
        assert fenced(bench) == 0


async def test_a_wave_that_its_instance_s_thread_cannot_answer_is_answered_by_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear(tmp_path / MODEL / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        sockets, loop_thread = bench.service._sockets, threading.current_thread()
        send = sockets.send

        def fails_in_threads(endpoint: str, reply: bytes) -> bool:
            if threading.current_thread() is not loop_thread:
                raise RuntimeError("no")
            return send(endpoint, reply)

        monkeypatch.setattr(sockets, "send", fails_in_threads)
        for _ in range(2):  # the thread lives on
            wave, read = await sent(bench, [x(1, 1)])
            await run(bench, wave, read)
        replies = Follower(bench.log, keys.replies("gw"))
        await replies.until(lambda: len(replies.entries) == 2)


async def test_who_asks_for_statistics_finds_what_was_answered(tmp_path: Path) -> None:
    linear(tmp_path / MODEL / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        wave, read = await sent(bench, [x(1, seed) for seed in range(3)])
        await run(bench, wave, read)
        wanted = StatisticsWanted("asker", "token")
        await bench.log.append(keys.batches(ME), [FIELD_FACT, pack_fact(wanted)])
        written = await Follower(bench.log, keys.replies("asker")).fact(StatisticsWritten)
        assert (written.executor, written.token) == (ME, "token")
        (loaded,) = bench.service._deployment.loaded_versions()
        counted = await bench.log.statistics(keys.statistics(MODEL, 1, loaded.content_hash))
        assert counted["success_count"] == 3


async def test_a_wave_that_was_burst_meanwhile_is_settled_request_by_request(tmp_path: Path) -> None:
    linear(tmp_path / MODEL / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        wave, read = await sent(bench, [x(1, seed) for seed in range(3)])
        assert await burst_wave(bench.log, MODEL, wave.stream, wave.entry_id, read)
        assert sorted(await bench.log.unsettled_ids(MODEL)) == wave.ids
        facts = Follower(bench.log, keys.facts(MODEL))
        await run(bench, wave, read)

        await until_settled(bench)
        ended = await facts.fact(RequestsEnded)
        assert ended.ids == b"".join(wave.ids)
        assert await bench.log.pending(MODEL) == (0, 0)
        assert fenced(bench) == 0, "its settlement was the first"


async def test_a_wave_that_others_settled_meanwhile_counts_as_fenced(tmp_path: Path) -> None:
    linear(tmp_path / MODEL / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        wave, read = await sent(bench, [x(1, seed) for seed in range(3)])
        assert await burst_wave(bench.log, MODEL, wave.stream, wave.entry_id, read)
        assert await bench.log.settle(MODEL, [(wave.ids[1], 1)], None, []) == [True]
        await run(bench, wave, read)

        await until_settled(bench)
        async with asyncio.timeout(30):
            while fenced(bench) != 1:
                await asyncio.sleep(0.001)
