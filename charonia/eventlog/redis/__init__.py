"""The event log on Redis or Valkey >= 7.0; the only package that knows their protocol.

May import the root of `eventlog`, hiredis and redis. Begin reading at `log`, the port's methods over one server;
`work`, `jobs` and `waves` do its parts, `server` is the connection, `stored_records` what is written, `cluster` the
same over a Redis Cluster. What scripts do to which key is said in `charonia/eventlog/scripts`.
"""

from __future__ import annotations

from .cluster.cluster_log import ClusterLog, open_log
from .log import RedisLog

__all__ = ["ClusterLog", "RedisLog", "open_log"]
