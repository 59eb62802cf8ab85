"""What the requests that this executor ran have used, by model and tenant (ADR 0055).

Batches and waves are added up in memory (`wave_settler` adds its own while it counts executions). What was added up is
taken about once a second and written to the log. An executor that is killed loses what it had not written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from charonia import keys
from charonia.facts.usage import (
    FAILED_INSTANCE_NS,
    FAILURES,
    INPUT_BYTES,
    MOST_TENANTS,
    OTHERS,
    OUTPUT_BYTES,
    PPM,
    QUEUE_NS,
    TOKENS,
    Amounts,
    hour_of,
    increments,
    nothing,
    receipt,
)
from charonia.inference import RECEIPT
from charonia.wire import BatchHeader, RequestRecord, response_sizes, with_parameters
from executors.batches.batch_results import Executed
from executors.metrics import ExecutorMetrics


class UsageCounts:
    """The amounts that are not in the log yet. `on_first` is called when there is something to write."""

    def __init__(self, metrics: ExecutorMetrics) -> None:
        self._metrics = metrics
        self._fresh: dict[tuple[str, int], dict[str, Amounts]] = {}
        """By model and version, then by tenant."""
        self._named: dict[str, tuple[int, set[str]]] = {}
        """By model: the day, and the tenants that it names."""
        self.on_first: Callable[[], None] = lambda: None

    def add(self, model: str, version: int, by_tenant: dict[str, Amounts]) -> None:
        """Add what one version's requests have used. The amounts are this object's from now on."""
        if not self._fresh:
            self.on_first()
        known = self._fresh.get((model, version))
        if known is None:
            self._fresh[model, version] = by_tenant
        else:
            _add(known, by_tenant)

    def add_batch(
        self,
        model: str,
        version: int,
        records: Sequence[RequestRecord],
        executed: Executed,
        won: Mapping[int, bool] | Sequence[bool],
    ) -> None:
        """Add what the won requests of a batch have used."""
        by_tenant: dict[str, Amounts] = {}
        for index, amounts in amounts_of(records, executed).items():
            if won[index] if isinstance(won, Sequence) else won.get(index, False):
                _add(by_tenant, {records[index].meta.tenant: amounts})
        if by_tenant:
            self.add(model, version, by_tenant)

    def take(self, now_ns: int) -> list[tuple[str, int, bytes, dict[str, int]]]:
        """Model, day, key and increments of all that is unwritten, which is the caller's from now on."""
        fresh, self._fresh = self._fresh, {}
        day, hour = hour_of(now_ns)
        found = []
        for (model, version), by_tenant in fresh.items():
            for tenant, amounts in by_tenant.items():
                self._metrics.used(model, version, tenant, amounts)
            bounded = self._bounded(model, day, by_tenant)
            found.append((model, day, keys.usage(model, day), increments(hour, bounded)))
        return found

    def _bounded(self, model: str, day: int, by_tenant: dict[str, Amounts]) -> dict[str, Amounts]:
        """The amounts by tenant, of those beyond the most tenants of a day together."""
        of_day, named = self._named.get(model, (-1, set()))
        if of_day != day:
            named = set()
            self._named[model] = day, named
        if len(named) + len(by_tenant) <= MOST_TENANTS:
            named.update(by_tenant)
            return by_tenant
        bounded: dict[str, Amounts] = {}
        for tenant, amounts in by_tenant.items():
            if len(named) < MOST_TENANTS:
                named.add(tenant)
            _add(bounded, {tenant if tenant in named else OTHERS: amounts})
        return bounded


def _add(known: dict[str, Amounts], more: Mapping[str, Amounts]) -> None:
    for tenant, amounts in more.items():
        before = known.get(tenant)
        if before is None:
            known[tenant] = amounts
        else:
            for at, amount in enumerate(amounts):
                before[at] += amount


def amounts_of(records: Sequence[RequestRecord], executed: Executed) -> dict[int, Amounts]:
    """What each request of a batch that has ended in it has used, by its index."""
    found: dict[int, Amounts] = {}
    sizes = response_sizes(executed.answers)
    for execution in executed.executions:
        spent_ns = execution.input_ns + execution.infer_ns + execution.output_ns
        rows = execution.rows or 1
        for index in execution.indices:
            record = records[index]
            share = record.rows
            found[index] = [
                1,
                0,
                share,
                share * PPM // rows,
                share * spent_ns // rows,
                max(0, execution.start_ns - record.accepted_ns),
                record.meta.size_bytes,
                sizes[index] + executed.sent_bytes.get(index, 0),
                executed.tokens.get(index, 0),
                0,
            ]
    for failure in executed.failures:
        record = records[failure.index]
        amounts = found[failure.index] = nothing()
        amounts[FAILURES] = 1
        amounts[QUEUE_NS] = max(0, failure.end_ns - failure.ran_ns - record.accepted_ns)
        amounts[FAILED_INSTANCE_NS] = failure.spent_ns(record.rows)
        amounts[INPUT_BYTES] = record.meta.size_bytes
        amounts[OUTPUT_BYTES] = executed.sent_bytes.get(failure.index, 0)
        amounts[TOKENS] = executed.tokens.get(failure.index, 0)
    return found


def with_receipts(
    executor: str, header: BatchHeader, records: Sequence[RequestRecord], executed: Executed
) -> list[bytes]:
    """The answers, with a receipt for each request that asks for one, failed ones as well."""
    answers = list(executed.answers)
    if not any(record.meta.wants_receipt for record in records):
        return answers
    of_batch = {index: execution.rows for execution in executed.executions for index in execution.indices}
    of_batch |= {failure.index: failure.batch_rows for failure in executed.failures}
    for index, amounts in amounts_of(records, executed).items():
        record = records[index]
        if record.meta.wants_receipt and answers[index]:
            place = executor, header.batch_id, header.attempts[index]
            text = receipt(amounts, record.rows, of_batch[index], record.meta.tenant, *place)
            answers[index] = with_parameters(answers[index], {RECEIPT: text})
    return answers
