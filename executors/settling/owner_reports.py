"""Sends reports on batches to the owners that dispatched them: through the log, or over a link in this process."""

from __future__ import annotations

from charonia.eventlog.local_link import LocalLink
from charonia.eventlog.port import Fields, Streams
from charonia.tasks import insist
from charonia.wire import BatchHeader


class OwnerReports:
    """Sends one executor's reports. `link` leads to the batcher in this process, if there is one."""

    def __init__(self, log: Streams, link: LocalLink | None) -> None:
        self._log = log
        self._link = link

    async def send(self, header: BatchHeader, fields: Fields) -> None:
        """Report facts, given as fields of an entry, repeating until the log takes them."""
        if header.report_to:
            await insist(lambda: self._log.append(header.report_to, fields), "the report of a batch cannot be written")
        else:
            self.hand(header, fields)

    def hand(self, header: BatchHeader, fields: Fields) -> None:
        """Report facts at once to an owner in this process. Does nothing for a forged header that names no owner."""
        if self._link is not None:
            self._link.reports[header.model].hand(fields)
