"""The private server of `charonia serve` and the files it leaves in the state directory.

May import `errors` and `offload.time_slices` alone: the supervisor stays small (no asyncio, no client library). Begin
reading at `private_server`; `programs` chooses the server program, `state_files` says what lies in the directory and
which program wrote it, `append_tail` repairs a file that ends within a write, `holder` keeps a second process out,
`shared_processor` says on which processor the server runs.
"""

from __future__ import annotations

from .private_server import PrivateServer, short_directory
from .programs import ServerBinary, find_server, wheel_binary
from .shared_processor import SharedProcessor

__all__ = ["PrivateServer", "ServerBinary", "SharedProcessor", "find_server", "short_directory", "wheel_binary"]
