"""An `Offload` whose transfers find no thread after some turns."""

from __future__ import annotations

from typing import Any

from charonia.errors import Unavailable
from charonia.offload.pool import Offload


class FewTurns:
    """Takes the place of `offload.transfer`: `left` turns are done, the ones after them raise `Unavailable`."""

    def __init__(self, offload: Offload, left: int) -> None:
        self._transfer = offload.transfer
        self.left = left

    async def __call__(self, *arguments: Any) -> Any:
        if not self.left:
            raise Unavailable("no thread can be started")
        self.left -= 1
        return await self._transfer(*arguments)
