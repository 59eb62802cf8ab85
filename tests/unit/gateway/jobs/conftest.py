"""A bench of gateways over a log in memory, for the tests of jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from job_bench import JobBench


@pytest.fixture
async def bench() -> AsyncIterator[Any]:
    bench = JobBench()
    await bench.serve()
    yield bench
    await bench.close()
