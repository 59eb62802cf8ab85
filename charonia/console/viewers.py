"""Who looks at the console, and what they may see and change. Pure.

Composition makes viewers from the headers of requests (`charonia.composition.console.console_role`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from charonia.eventlog.port import Limits


@dataclass(frozen=True, slots=True)
class Viewer:
    """`scoped`: only what is `tenant`'s may be shown, and changed.

    `acts`: may change its own work. `operates`: may change what concerns the work of all. `limits` bound what it
    submits, for a model.
    """

    tenant: str = ""
    scoped: bool = False
    acts: bool = False
    operates: bool = False
    limits: Limits = field(default_factory=Limits)

    def may_see(self, tenant: str) -> bool:
        return not self.scoped or tenant == self.tenant


OPERATOR = Viewer(acts=True, operates=True)
"""Each viewer of a console that asks for no key."""
