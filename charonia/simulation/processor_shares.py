"""The processors of a recorded run, and what used them, as its executors reported it (`ProcessorUse`). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from charonia.facts.processor_use import BATCHER_APART, ProcessorUse

Said = tuple[str, ProcessorUse]
"""The executor, and one of its reports."""

_MIN_NS = 1_000_000_000
_MIN_BATCHES = 8
"""Reports of an executor count only if they cover this much time and this many batches."""
_LEAST_LEFT = 0.25
"""The least share of the processors that the server has: the system divides them among all processes."""


@dataclass(frozen=True, slots=True)
class ProcessorShares:
    """A machine with `processors`; `host` is the name of its host, or all names that its containers have. Processes
    that are not the server's keep `others` of them busy. An execution uses `share` of one while it runs, above 1 with
    several threads; all else of the server `batch_ns` of one for each batch. Executors say that a batch runs for
    `run_ns` on average; 0 where that is not known.
    """

    host: str
    processors: float
    others: float = 0.0
    share: float = 1.0
    batch_ns: float = 0.0
    run_ns: float = 0.0

    @property
    def left(self) -> float:
        """How many processors the server has."""
        return max(self.processors - self.others, self.processors * _LEAST_LEFT)


@dataclass(slots=True)
class _Rates:
    """How the counters of one executor grew between its first and its last report."""

    first: ProcessorUse
    last: ProcessorUse

    @property
    def ns(self) -> int:
        return self.last.at_ns - self.first.at_ns

    @property
    def batches(self) -> int:
        return self.last.batches - self.first.batches

    def of(self, name: str) -> float:
        used: int = getattr(self.last, name) - getattr(self.first, name)
        return max(0, used) / self.ns


def shares_of(said: Iterable[Said]) -> tuple[ProcessorShares, ...]:
    """One for each machine with enough reports, ordered by name. Amounts are of all models together. Executors of one
    machine say so by a number; those of earlier releases are taken for as many machines as they have host names.
    """
    by_executor: dict[str, list[ProcessorUse]] = {}
    for executor, use in said:
        by_executor.setdefault(executor, []).append(use)
    by_machine: dict[int | str, list[_Rates]] = {}
    for uses in by_executor.values():
        uses.sort(key=lambda use: use.at_ns)
        rates = _Rates(uses[0], uses[-1])
        if rates.ns >= _MIN_NS and rates.batches >= _MIN_BATCHES:
            by_machine.setdefault(rates.last.shared or rates.last.host, []).append(rates)
    return tuple(sorted(map(_machine, by_machine.values()), key=lambda one: one.host))


def _machine(executors: Sequence[_Rates]) -> ProcessorShares:
    longest = max(executors, key=lambda one: one.ns)
    servers: dict[tuple[str, int], _Rates] = {}
    for one in executors:  # executors of one server report the same use of it; numbers of processes are a container's
        server_of = one.last.host, one.last.tree
        if server_of not in servers or one.ns > servers[server_of].ns:
            servers[server_of] = one
    server = sum(one.of("server_ns") for one in servers.values())
    instances = sum(one.of("instances_ns") for one in executors)
    ran = sum(one.of("ran_ns") for one in executors)
    batches = sum(one.of("batches") for one in executors)
    return ProcessorShares(
        ", ".join(sorted({one.last.host for one in executors})),
        longest.last.processors,
        others=max(0.0, longest.of("busy_ns") - server),
        share=instances / ran if ran else 0.0,
        batch_ns=max(0.0, server - instances) / batches,
        run_ns=ran / batches,
    )


def is_batcher_apart(said: Iterable[Said]) -> bool | None:
    """Whether batches came from a batcher in another process than their executor's, by the latest report; None where no
    report says so.
    """
    known = [use for _, use in said if use.batcher]
    return max(known, key=lambda use: use.at_ns).batcher == BATCHER_APART if known else None


def are_started_apart(said: Iterable[Said]) -> bool:
    """Whether several executors, whose batcher is in another process, were started each by itself, not by one `serve`.

    False where it is not known.
    """
    said = list(said)
    servers = {executor: (use.host, use.tree) for executor, use in said}
    return bool(is_batcher_apart(said)) and 1 < len(servers) == len(set(servers.values()))


def shares_text(shares: ProcessorShares) -> str:
    """The shares in one line, for people."""
    return (
        f"{shares.processors:g} processors of {shares.host}, of which others used {shares.others:.2f}; an execution "
        f"uses {shares.share:.2f} of one, the rest of the server {shares.batch_ns / 1e6:.2f} ms a batch"
    )
