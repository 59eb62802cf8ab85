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

    def share_of(self, other: _Rates) -> float:
        """The share of another one's time that this one covers: the rest is before its start or after its end."""
        begin_ns, end_ns = max(self.first.at_ns, other.first.at_ns), min(self.last.at_ns, other.last.at_ns)
        return max(0, end_ns - begin_ns) / other.ns

    def of(self, name: str) -> float:
        used: int = getattr(self.last, name) - getattr(self.first, name)
        return max(0, used) / self.ns


def shares_of(said: Iterable[Said]) -> tuple[ProcessorShares, ...]:
    """One for each machine with enough reports, ordered by name. Amounts are of all models together. Executors of one
    machine say so by a number, which a machine that starts again changes; those of earlier releases say a host name.
    """
    by_executor: dict[str, list[ProcessorUse]] = {}
    for executor, use in said:
        by_executor.setdefault(executor, []).append(use)
    by_number: dict[int, list[_Rates]] = {}
    by_host: dict[str, list[_Rates]] = {}
    for uses in by_executor.values():
        uses.sort(key=lambda use: use.at_ns)
        rates = _Rates(uses[0], uses[-1])
        if rates.ns >= _MIN_NS and rates.batches >= _MIN_BATCHES:
            if rates.last.shared:
                by_number.setdefault(rates.last.shared, []).append(rates)
            else:
                by_host.setdefault(rates.last.host, []).append(rates)
    machines = _started_again(by_number.values())
    for host, earlier in by_host.items():
        named = [executors for executors in machines if host in _hosts(executors)]
        if len(named) == 1:
            named[0] += earlier
        else:  # of several machines with that name any may be the one
            machines.append(earlier)
    return tuple(sorted(map(_machine, machines), key=lambda one: one.host))


def _started_again(boots: Iterable[list[_Rates]]) -> list[list[_Rates]]:
    """The executors of each machine, of those of each of its starts: the same host name, one after the other."""
    machines: list[list[_Rates]] = []
    for executors in sorted(boots, key=_begin_ns):
        before = [one for one in machines if _hosts(one) & _hosts(executors) and _end_ns(one) <= _begin_ns(executors)]
        if before:
            max(before, key=_end_ns).extend(executors)
        else:
            machines.append(list(executors))
    return machines


def _hosts(executors: Iterable[_Rates]) -> set[str]:
    return {one.last.host for one in executors}


def _begin_ns(executors: Iterable[_Rates]) -> int:
    return min(one.first.at_ns for one in executors)


def _end_ns(executors: Iterable[_Rates]) -> int:
    return max(one.last.at_ns for one in executors)


def _machine(executors: Sequence[_Rates]) -> ProcessorShares:
    longest = max(executors, key=lambda one: one.ns)
    servers: list[_Rates] = []
    for one in sorted(executors, key=lambda one: -one.ns):
        # executors of one server report the same use of it; numbers of processes are a container's, and come again
        same = (other for other in servers if (other.last.host, other.last.tree) == (one.last.host, one.last.tree))
        if not any(one.share_of(other) for other in same):
            servers.append(one)
    server = sum(one.of("server_ns") for one in servers)
    meanwhile = sum(one.of("server_ns") * one.share_of(longest) for one in servers)
    instances = sum(one.of("instances_ns") for one in executors)
    ran = sum(one.of("ran_ns") for one in executors)
    batches = sum(one.of("batches") for one in executors)
    return ProcessorShares(
        ", ".join(sorted(_hosts(executors))),
        longest.last.processors,
        others=max(0.0, longest.of("busy_ns") - meanwhile),
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
