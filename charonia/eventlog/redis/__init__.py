"""The event log on Redis or Valkey >= 7.0; the only package that knows their protocol.

May import the root of `eventlog`, hiredis and redis. Begin reading at `log`, which implements the port over one server;
`work`, `jobs` and `waves` are its parts. `server` is the connection, `stored_records` the format of keys, `cluster` the
same port over a Redis Cluster. The headers of `charonia/eventlog/scripts` say which script changes which key.
"""

from __future__ import annotations

from .cluster.cluster_log import ClusterLog, open_log
from .log import RedisLog

__all__ = ["ClusterLog", "RedisLog", "open_log"]
