"""The event log on Redis or Valkey >= 7.0; the only package that knows their protocol.

`transport` is one transport, `hot_connection` the hot connection that stays, `log` the port's methods on it, `reader`
the streams' reader, `address` what a URL says; `cluster_log`, `cluster_reader` and `topology` are the same over a Redis
Cluster. What scripts do to which key is said in `charonia/eventlog/scripts`.
"""

from __future__ import annotations

from .cluster.cluster_log import ClusterLog, open_log
from .log import RedisLog

__all__ = ["ClusterLog", "RedisLog", "open_log"]
