"""The event log on Redis or Valkey >= 7.0; the only package that knows their protocol.

`wire` is one transport, `connection` the hot connection that stays, `log` the port's methods on it, `reader` the
streams' reader, `address` what a URL says. What scripts do to which key is said in `charonia/eventlog/scripts`.
"""

from __future__ import annotations

from .log import RedisLog

__all__ = ["RedisLog"]
