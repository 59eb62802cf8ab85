"""The private server of `charonia serve` and the files it leaves in the state directory.

May import `errors` and `offload.time_slices` alone: the supervisor stays small (no asyncio, no client library). Begin
reading at `private_server`; `programs` chooses the server program, `state_files` says what lies in the directory and
which program wrote it, `append_tail` repairs a file that ends within a write, `holder` keeps a second process out.
"""

from __future__ import annotations

from .private_server import PrivateServer, short_directory
from .programs import ServerBinary, find_server, wheel_binary

__all__ = ["PrivateServer", "ServerBinary", "find_server", "short_directory", "wheel_binary"]
