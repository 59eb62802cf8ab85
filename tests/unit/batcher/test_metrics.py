"""What a batcher tells of its models, read back from the text of its page."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
from batching_cluster import Batcher, Cluster, until
from prometheus_client.parser import text_string_to_metric_families

from batcher.metrics import BatcherMetrics
from charonia.clock import wall_ns
from charonia.eventlog.port import Limits
from charonia.facts.events import ProcessJoined, VersionLoaded, VersionUnloaded
from charonia.models.config_forms import parse
from charonia.options.settings import MetricsSettings
from charonia.tensors import Tensor
from charonia.wire import SequenceMark, pack_request, record_fields, request_meta
from executors.configuration.config import normalise

EXECUTOR = "executor-1"
CONFIG = """
name: "%s" backend: "python" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
TAGGED = 'metric_tags { key: "team" value: "vision" }'
TARGET = 'dynamic_batching { } parameters { key: "charonia.target_p99_ms" value { string_value: "50" } }'
ENSEMBLE = """
name: "both" platform: "ensemble" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
ensemble_scheduling { step {
  model_name: "plain" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }
"""
PENDING, RUNNING = "nv_inference_pending_request_count", "charonia_batcher_running_requests"
FAILED = "nv_inference_request_failure_total"


class World:
    """A batcher that owns models of an executor which does nothing."""

    def __init__(self, cluster: Cluster, batcher: Batcher) -> None:
        self._cluster = cluster
        self._batcher = batcher
        self.metrics = BatcherMetrics(batcher.service, batcher.control.catalog)
        self._numbers = 0

    async def serve(self, model: str, more: str = "", *, version: int = 1, config: str = "") -> None:
        packed = normalise(parse(config or CONFIG % model + more)).SerializeToString()
        await self.tell(VersionLoaded(EXECUTOR, model, version, f"hash-{version}", 1, packed))
        held = self._batcher.control.catalog.held
        await until(lambda: model in self._batcher.service.owned and version in held(model))

    async def tell(self, fact: object) -> None:
        await self._batcher.control.announce(fact)  # type: ignore[arg-type]

    async def ask(
        self,
        model: str,
        count: int = 1,
        *,
        version: int = 1,
        endpoint: bytes = b"gateway-1",
        late: bool = False,
        mark: SequenceMark | None = None,
    ) -> None:
        """Queue requests, and return once the batcher has read them."""
        tensor = Tensor.of("x", np.zeros((1, 1), np.float32))
        windows = self._batcher.service.owned[model].windows
        before = windows.unsettled + windows.settled_requests
        for _ in range(count):
            self._numbers += 1
            request_id = self._numbers.to_bytes(15, "big") + b"\0"
            record = pack_request(
                *(request_id, endpoint, b"", request_meta(version, f"hash-{version}", [tensor], (), {}), [tensor.data]),
                rows=1,
                signature=8,
                level=0,
                accepted_ns=wall_ns(),
                deadline_ns=1 if late else 0,
                sequence=mark,
            )
            await self._batcher.log.accept(model, 0, 0, [(request_id, 4)], record_fields([record]), Limits())
        await until(lambda: windows.unsettled + windows.settled_requests == before + count)

    def samples(self) -> dict[tuple[str, ...], float]:
        """The page: name and values of the labels, in the order of their names, to the value."""
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(self.metrics.render().decode())
            for sample in family.samples
        }

    def of(self, *names: str) -> dict[tuple[str, ...], float]:
        """The samples of these names."""
        return {key: value for key, value in self.samples().items() if key[0] in names}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    cluster = Cluster("")
    batcher = await cluster.batcher("batcher-1", prefetch=0)
    await batcher.control.announce(ProcessJoined("executor", EXECUTOR))
    yield World(cluster, batcher)
    await cluster.close()


async def test_waiting_and_running_requests_of_several_models_and_versions(world: World) -> None:
    await world.serve("plain", TAGGED)
    await world.serve("plain", version=2)
    await world.serve("other", "dynamic_batching { }")
    before = world.of(PENDING, RUNNING, "charonia_batcher_owned_models")
    assert before == {
        (PENDING, "vision", "plain", "1"): 0,
        (PENDING, "plain", "2"): 0,
        (PENDING, "other", "1"): 0,
        (RUNNING, "plain"): 0,
        (RUNNING, "other"): 0,
        ("charonia_batcher_owned_models",): 2,
    }, "tags are those of the version"
    await world.ask("plain", 3)  # one by one: the model has no dynamic batcher
    await world.ask("plain", 2, version=2)
    await world.ask("other", 1)
    await world.ask("other", 4)
    assert world.of(PENDING, RUNNING) == {
        (PENDING, "vision", "plain", "1"): 2,
        (PENDING, "plain", "2"): 1,
        (PENDING, "other", "1"): 4,
        (RUNNING, "plain"): 2,
        (RUNNING, "other"): 1,
    }


async def test_what_leaves_the_page_when_versions_and_models_leave(world: World) -> None:
    await world.serve("plain", TAGGED)
    await world.serve("plain", version=2)
    await world.serve("other")
    await world.ask("plain", 2, version=2)
    await world.tell(VersionUnloaded(EXECUTOR, "plain", 1))
    catalog = world._batcher.control.catalog
    await until(lambda: list(catalog.held("plain")) == [2])
    assert {key[1:] for key in world.of(PENDING)} == {("plain", "2"), ("other", "1")}
    await world.tell(VersionUnloaded(EXECUTOR, "other", 1))
    await until(lambda: not catalog.held("other"))
    assert {key[1:] for key in world.of(PENDING)} == {("plain", "2")}

    await world._batcher.service.drain()
    assert {key: value for key, value in world.samples().items() if len(key) > 1} == {}, "another batcher tells of them"
    assert world.of("charonia_batcher_owned_models") == {("charonia_batcher_owned_models",): 0}


async def test_failures_are_counted_that_no_gateway_counts(world: World) -> None:
    """Those of requests for which a model or an ensemble waits; a gateway counts its own."""
    await world.serve("plain", TAGGED)
    await world.serve("other")
    assert world.of(FAILED) == {}
    await world.ask("plain", 2, endpoint=b"executor-7", late=True)
    await world.ask("plain", 1, endpoint=b"gateway-1", late=True)
    await until(lambda: not world._batcher.service.owned["plain"].windows.unsettled)
    assert world.of(FAILED) == {(FAILED, "vision", "plain", "REJECTED", "1"): 2}
    await world.ask("plain", 1, version=9, endpoint=b"executor-7")
    await until(lambda: not world._batcher.service.owned["plain"].windows.unsettled)
    assert world.of(FAILED) == {(FAILED, "vision", "plain", "REJECTED", "1"): 2}, "no label that a client may choose"
    await world.tell(VersionUnloaded(EXECUTOR, "plain", 1))
    await until(lambda: not world._batcher.control.catalog.held("plain"))
    assert world.of(FAILED) == {}
    await world.serve("plain", TAGGED)
    await world.serve("plain", TAGGED, version=9)
    assert world.of(FAILED) == {}, "a version that is loaded again begins at 0, and so does one that was refused before"
    await world.ask("plain", 1, endpoint=b"executor-7", late=True)
    await until(lambda: not world._batcher.service.owned["plain"].windows.unsettled)
    await world.serve("plain", TAGGED, version=3)
    assert world.of(FAILED) == {(FAILED, "vision", "plain", "REJECTED", "1"): 1}


async def test_live_sequences_are_told_of_models_that_have_any(world: World) -> None:
    name = "charonia_live_sequences"
    await world.serve("plain")
    assert world.of(name) == {}
    await world.serve("steps", "sequence_batching { }")
    assert world.of(name) == {(name, "steps"): 0}
    for correlation_id in ("a", "b"):
        await world.ask("steps", mark=SequenceMark(correlation_id, True, False))
    await world.ask("steps", mark=SequenceMark("a", False, False))
    assert world.of(name, PENDING, RUNNING) == {
        (name, "steps"): 2,
        (PENDING, "plain", "1"): 0,
        (PENDING, "steps", "1"): 2,
        (RUNNING, "plain"): 0,
        (RUNNING, "steps"): 1,
    }


async def test_what_a_batcher_chose_to_meet_a_target(world: World) -> None:
    names = ("charonia_adaptive_batch_size", "charonia_adaptive_delay_us", "charonia_adaptive_in_reach")
    await world.serve("plain")
    assert world.of(*names) == {}
    await world.serve("target", TARGET)
    await world.ask("target")
    scheduler = world._batcher.service.owned["target"].scheduler
    choice = scheduler.adaptive()[1].choice
    assert world.of(*names) == {
        (names[0], "target", "1"): choice.size,
        (names[1], "target", "1"): choice.delay_ns // 1000,
        (names[2], "target", "1"): choice.state == "in reach",
    }
    assert choice.size >= 1


async def test_seals_of_journals_are_told_by_model(world: World) -> None:
    names = [f"charonia_journal_{name}" for name in ("sealed_entries_total", "seal_failures_total", "unsealed_seconds")]
    assert world.of(*names) == {}
    for model in ("plain", "other"):
        await world.serve(model)
    sealing = world._batcher.service.sealings["plain"]
    sealing.sealed_entries, sealing.failures = 7, 2
    sealing.complete_ns -= 5_000_000_000
    found = world.of(*names)
    assert 5 <= found.pop((names[2], "plain")) < 65
    assert 0 <= found.pop((names[2], "other")) < 60
    assert found == {
        (names[0], "plain"): 7,
        (names[0], "other"): 0,
        (names[1], "plain"): 2,
        (names[1], "other"): 0,
    }


@pytest.mark.parametrize("counters", [True, False])
async def test_an_ensemble_has_what_an_executor_tells_of_other_models(world: World, counters: bool) -> None:
    await world.serve("plain")
    await world.serve("both", config=ENSEMBLE)
    world.metrics = BatcherMetrics(
        world._batcher.service, world._batcher.control.catalog, MetricsSettings(counters=counters)
    )
    owned = world._batcher.service.owned["both"]
    owned.counted[1] = {  # type: ignore[attr-defined]
        "unawaited_count": 3,
        "unawaited_ns": 5_500_000,
        "inference_count": 4,
        "execution_count": 4,
        "queue_ns": 2_000,
        "unawaited_failures": 2,
    }
    owned.counted[2] = {"unawaited_count": 9}  # type: ignore[attr-defined]
    timed = {
        "nv_inference_request_duration_us_total": 5500,
        "nv_inference_queue_duration_us_total": 2,
        "nv_inference_compute_input_duration_us_total": 0,
        "nv_inference_compute_infer_duration_us_total": 0,
        "nv_inference_compute_output_duration_us_total": 0,
    }
    plain = {
        "nv_inference_request_success_total": 3,
        "nv_inference_count_total": 4,
        "nv_inference_exec_count_total": 4,
    }
    found = {key: value for key, value in world.samples().items() if key[0] in timed or key[0] in plain}
    expected = plain | (timed if counters else {})
    assert found == {(name, "both", "1"): value for name, value in expected.items()}, "no other model, and no version"
    assert world.of(FAILED) == {(FAILED, "both", "OTHER", "1"): 2}


async def test_changes_of_the_epoch_are_told_where_this_process_counts_them(world: World) -> None:
    before = world.samples().keys()
    world.metrics.log_epoch_changes = lambda: 3
    added = {key: value for key, value in world.samples().items() if key not in before}
    assert list(added.values()) == [3]
    ((name,),) = added
    assert "epoch" in name


async def test_a_page_without_models_is_well_formed(world: World) -> None:
    page = world.metrics.render().decode()
    assert "# TYPE nv_inference_pending_request_count gauge" in page
    assert world.of("charonia_batcher_owned_models") == {("charonia_batcher_owned_models",): 0}
    helped = [line.split()[2] for line in page.splitlines() if line.startswith("# HELP")]
    assert len(helped) == len(set(helped))
