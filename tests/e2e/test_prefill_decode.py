"""A prefill and a decode pool with an executor each: the example of `docs/howto/tensorrt-llm.md` over small engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from disaggregated_engines import Gates, text_of, write_models
from e2e_asking import until
from e2e_parts import Part, Parts, parts_over_a_log
from trtllm_models import BACKENDS, Asker, Refusal

PROMPT = "The capital of France is"
TOKENS = 6
DECODED = tuple(f"decode.{index}" for index in range(TOKENS))


@dataclass
class Pools:
    """`prefill`, `decode` and `front` have an executor each, which a test kills and starts again."""

    parts: Parts
    gates: Gates
    repository: Path
    executors: dict[str, Part]
    gateway: Part
    asker: Asker
    started: int = 0

    def start(self, pool: str) -> None:
        self.started += 1
        flags = (f"--model-repository={self.repository}", f"--pool={pool}", f"--backend-directory={BACKENDS}")
        self.executors[pool] = self.parts.start("executor", f"{pool}-{self.started}", *flags)

    def replace(self, pool: str) -> None:
        """Kill the pool's executor with all it holds, and start another."""
        if pool == "prefill":
            (self.gates.directory / "port").unlink()
        self.executors[pool].process.kill()
        self.executors[pool].process.wait()
        self.start(pool)

    def begin(self) -> None:
        sampling = json.dumps({"max_tokens": TOKENS, "temperature": 0})
        self.asker.begin("disaggregated", text_input=PROMPT, sampling_parameters=sampling, stream=True)

    def rest(self) -> str:
        found, final = "", False
        while not final:
            result, final = self.asker.next()
            if result.get_response().outputs:
                found += self.text(result)
        return found

    def text(self, result: Any) -> str:
        return str(result.as_numpy("text_output")[0].decode())


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    directory = tmp_path_factory.mktemp("pools")
    gates = Gates(directory / "gates")
    write_models(directory / "models", gates)
    with parts_over_a_log(directory) as parts:
        pools = Pools(parts, gates, directory / "models", {}, None, None)  # type: ignore[arg-type]
        parts.start("batcher", "batcher")
        for pool in ("prefill", "decode", "front"):
            pools.start(pool)
        pools.gateway = parts.gateway("gateway")
        yield pools


@pytest.fixture
def pools(stack: Pools) -> Iterator[Pools]:
    for file in stack.gates.directory.iterdir():
        if file.name != "port":
            file.unlink()
    for model in ("prefill", "decode", "disaggregated", "tensorrt_llm_bls"):
        until("it is ready", lambda model=model: stack.gateway.get(f"/v2/models/{model}/ready")[0] == 200)
    stack.asker = Asker(stack.gateway.grpc, rows=False)
    yield stack
    stack.asker.close()


def test_the_second_half_goes_on_with_what_the_first_computed(pools: Pools) -> None:
    pools.gates.open("prefill", "decode", *DECODED)
    pools.begin()
    assert pools.rest() == text_of(PROMPT, TOKENS)
    assert (pools.gates.count("prefilled"), pools.gates.count("recomputed")) == (1, 0)
    assert pools.gates.held() == 0


@pytest.mark.long
def test_a_first_half_whose_executor_is_lost_runs_again(pools: Pools) -> None:
    pools.begin()
    pools.gates.until("at.prefill")
    pools.replace("prefill")
    pools.gates.until("at.prefill", 2)
    pools.gates.open("prefill", "decode", *DECODED)
    assert pools.rest() == text_of(PROMPT, TOKENS)
    assert pools.gates.count("recomputed") == 0
    assert pools.gates.held() == 0


@pytest.mark.long
def test_blocks_that_were_lost_with_their_executor_are_computed_again(pools: Pools) -> None:
    """The first half had answered, and the second had not taken them."""
    pools.gates.open("prefill")
    pools.begin()
    pools.gates.until("at.decode")
    pools.replace("prefill")
    until("the new engine is up", lambda: (pools.gates.directory / "port").exists())
    pools.gates.open("decode", *DECODED)
    assert pools.rest() == text_of(PROMPT, TOKENS)
    assert pools.gates.count("prefilled") == 2
    assert pools.gates.held() == 0


@pytest.mark.long
def test_a_second_half_whose_executor_is_lost_goes_on_after_what_was_seen(pools: Pools) -> None:
    pools.gates.open("prefill", "decode", *DECODED[:2])
    pools.begin()
    seen = "".join(pools.text(pools.asker.next()[0]) for _ in range(2))
    assert seen == text_of(PROMPT, 2)
    pools.gates.until("at.decode.2")
    pools.replace("decode")
    pools.gates.until("at.decode.2", 2)
    pools.gates.open(*DECODED)
    assert seen + pools.rest() == text_of(PROMPT, TOKENS), "each token once"
    assert (pools.gates.count("prefilled"), pools.gates.count("recomputed")) == (1, 1)


@pytest.mark.parametrize("at", ["prefill", "decode", "decode.2"])
def test_a_cancel_reaches_the_half_that_runs_and_nothing_stays_held(pools: Pools, at: str) -> None:
    before = ("prefill", "decode", *DECODED[:2])
    pools.gates.open(*before[: before.index(at)] if at in before else before)
    pools.begin()
    pools.gates.until(f"at.{at}")
    assert pools.gates.held() == (1 if at == "decode" else 0)
    pools.asker.client.stop_stream(cancel_requests=True)
    pools.gates.until(f"cancelled.{at}")
    until("nothing is held", lambda: pools.gates.held() == 0)


def test_tensors_of_tensorrt_llm_reach_both_halves(pools: Pools) -> None:
    pools.gates.open("prefill", "decode", *DECODED)
    asker = Asker(pools.gateway.grpc)
    parts = asker.texts("tensorrt_llm_bls", text_input=PROMPT, max_tokens=TOKENS, stream=True)
    assert (len(parts), "".join(parts)) == (TOKENS, text_of(PROMPT, TOKENS))
    asker.close()
    assert pools.gates.held() == 0


def test_what_the_first_half_refuses_ends_the_request(pools: Pools) -> None:
    pools.asker.begin("disaggregated", text_input=PROMPT, sampling_parameters="[1]")
    with pytest.raises(Refusal, match="tensor 'sampling_parameters' is no JSON object"):
        pools.asker.next()
