"""The console in this process over a real log: a viewer, and what there is to see: a model, jobs, dead letters."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlencode

import httpx2
import msgpack
import numpy as np

from charonia import keys
from charonia.clock import wall_ns
from charonia.composition.console.console_role import read_statistics, read_webhook
from charonia.console.readings import Sampler
from charonia.console.web_app import ConsoleApp
from charonia.eventlog.port import EventLog, Limits
from charonia.eventlog.redis import open_log
from charonia.facts.events import FIELD_FACT, ProcessJoined, RepositoryScanned, VersionLoaded, pack_fact
from charonia.facts.jobs import OUTCOME_CODES, JobEnd, JobState, NewJob
from charonia.models.config_forms import parse
from charonia.tensors import Tensor
from charonia.wire import (
    FIELD_ABOUT,
    FIELD_RECORD,
    FLAG_JOB,
    FLAG_JOURNALLED,
    pack_request,
    pack_response,
    record_fields,
    request_meta,
)
from executors.configuration.config import normalise

MODEL = "a model"  # its name has to be quoted in addresses
AT = "a%20model"
INPUT = Tensor.of("X", np.arange(16, dtype=np.float32).reshape(1, 16))
META = request_meta(1, "hash", [INPUT], ("Y",), {})
CONFIG = f"""
name: "{MODEL}" backend: "python" max_batch_size: 8
input {{ name: "X" data_type: TYPE_FP32 dims: 16 }}
output {{ name: "Y" data_type: TYPE_FP32 dims: 16 }}
"""
FORM = {"content-type": "application/x-www-form-urlencoded"}
KEYS = '[tenants.acme]\nkeys = ["key of acme"]\n[tenants.umbrella]\nkeys = ["key of umbrella"]\n'
METRICS = (
    f'# TYPE nv_inference_request_success counter\nnv_inference_request_success{{model="{MODEL}",version="1"}} 5\n'
)


async def opened(url: str, mode: str = "none") -> AsyncIterator[EventLog]:
    """The log at a URL with an executor that has loaded the model, in this mode of model control."""
    log = open_log(url)
    await log.open()
    packed = normalise(parse(CONFIG)).SerializeToString()
    for fact in (
        ProcessJoined("executor", "executor-1", host="<b>host</b>", pid=7),
        VersionLoaded("executor-1", MODEL, 1, "hash", 2, packed, load_ns=3_000_000_000),
        RepositoryScanned("executor-1", (MODEL,), mode, True),
    ):
        await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])
    counters = {"success_count": 40, "success_ns": 10**9, "execution_count": 10, "b4_count": 10, "b4_infer_ns": 10**8}
    await log.add_statistics(keys.statistics(MODEL, 1, "hash"), counters)
    await log.beat("executor", "executor-1", 60_000)
    yield log
    await log.close()


async def metrics() -> str:
    return METRICS


class Browser:
    """A viewer of the console in this process."""

    def __init__(self, log: EventLog, identify: Any = None, *, actions: bool = False) -> None:
        self.sampler = Sampler(log, metrics, interval_s=0.1)
        self.app = ConsoleApp(log, self.sampler, read_statistics, identify, read_webhook=read_webhook, actions=actions)
        self._client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=self.app.asgi), base_url="http://console")

    async def get(self, path: str, **headers: str) -> httpx2.Response:
        return await self._client.get(f"/console{path}", headers=headers)

    async def post(self, path: str, fields: list[tuple[str, str]], **headers: str) -> httpx2.Response:
        """A form as a browser sends it; headers as "" are left out."""
        named = {"origin": "http://console", "sec-fetch-site": "same-origin", **FORM, **headers}
        kept = {name.replace("_", "-"): value for name, value in named.items() if value}
        return await self._client.post(f"/console{path}", content=urlencode(fields), headers=kept)

    async def request(self, method: str, path: str, root: str = "/console") -> httpx2.Response:
        return await self._client.request(method, f"{root}{path}")

    async def event(self, events: AsyncIterator[bytes]) -> tuple[str, Any]:
        """The next event of an open page: its name and its document."""
        kind, data = (await anext(events)).decode().split("\n")[:2]
        return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    async def region(self, events: AsyncIterator[bytes], name: str) -> str:
        """A region of an open page when it is read the next time."""
        while True:
            _, document = await self.event(events)
            if name in document.get("regions", {}):
                return str(document["regions"][name])

    async def close(self) -> None:
        await self._client.aclose()
        await self.app.close()
        await self.sampler.close()


def packed_request(request_id: bytes, flags: int = FLAG_JOB | FLAG_JOURNALLED, tenant: str = "") -> bytes:
    now_ns, meta = wall_ns(), META.of_tenant(tenant)
    return pack_request(
        request_id, b"g", b"", meta, [INPUT.data], rows=1, signature=1, level=0, accepted_ns=now_ns, flags=flags
    )


async def call(log: EventLog, tenant: str = "") -> bytes:
    """Queues a call that is no job; its id."""
    request_id = secrets.token_bytes(16)
    packed = packed_request(request_id, 0, tenant)
    lane, sizes = keys.lane_of(tenant), [(request_id, len(packed))]
    await log.accept(MODEL, 0, lane, sizes, record_fields([packed]), Limits(), tenant=tenant)
    return request_id


async def submit(log: EventLog, tenant: str = "", **about: Any) -> bytes:
    job_id = secrets.token_bytes(16)
    packed = packed_request(job_id)
    new = NewJob(job_id, len(packed), wall_ns() // 1000, 600, tenant, about=about)
    await log.accept_job(MODEL, 0, keys.lane_of(tenant), new, record_fields([packed]), Limits())
    return job_id


async def run(log: EventLog, *ids: bytes) -> None:
    token = await log.take_ownership(MODEL, "batcher-1", "")
    await log.begin_attempt(MODEL, token, ids, 1, jobs=ids, journalled=ids, executor="executor-1", batch_id="b1")
    for job_id in ids:
        end = JobEnd(JobState.SUCCEEDED, pack_response(job_id, MODEL, 1, [INPUT], {}), {"batch_rows": 2})
        code = OUTCOME_CODES[JobState.SUCCEEDED]
        assert await log.settle(MODEL, [(job_id, 1)], None, [], ends={job_id: end}, outcomes=code) == [True]


async def bury(log: EventLog, tenant: str = "") -> bytes:
    """A dead letter; its id."""
    request_id = secrets.token_bytes(16)
    about = {"id": request_id, "model": MODEL, "version": 1, "attempts": 4, "error": "it <i>died</i>", "tenant": tenant}
    fields = [FIELD_RECORD, packed_request(request_id), FIELD_ABOUT, msgpack.packb({**about, "stderr": "last words"})]
    await log.append(keys.dead_letters(MODEL), fields)
    return request_id
