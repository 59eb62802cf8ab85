"""What a connection says of commands that it cannot send."""

from __future__ import annotations

import pytest

from charonia.errors import LogAway
from charonia.eventlog.redis.server.address import parse_address
from charonia.eventlog.redis.server.hot_connection import Connection


async def test_a_command_that_was_not_sent_is_known_to_be_so() -> None:
    """So that counts may be written later, which must not be written twice."""
    connection = Connection(parse_address("redis://127.0.0.1:1"), name="test")
    for send in (connection.execute, connection.execute_lazily):
        with pytest.raises(LogAway, match="cannot be reached"):
            await send("PING")
    assert not connection.batch_soon([b""], 1, print)
