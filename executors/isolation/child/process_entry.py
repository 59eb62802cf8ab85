"""The process of isolated models: enters its sandbox, then runs `process_host`. Nothing large is imported before.

Started as `python -m executors.isolation.child.process_entry POLICY DESCRIPTOR` and `StartupArguments`. POLICY is JSON:
`{"sandboxed": bool, "readable": [path, ...], "temporary": path, "in_bulk": bool}`; DESCRIPTOR is the socket that
descriptors come over.
"""

from __future__ import annotations

import json
import os
import sys

from charonia.offload.time_slices import work_in_bulk
from executors.isolation import sandbox

MORE_TASKS = 4096
"""So many more processes and threads than its user has when it starts may run; only as an ordinary user."""


def main() -> None:
    policy, descriptor, *words = sys.argv[1:]
    told = json.loads(policy)
    os.setpgid(0, 0)  # processes that its model starts end with it
    sandbox.limit_processes(MORE_TASKS)
    if told.get("in_bulk"):
        work_in_bulk(ends_first=False)  # a request would be blamed for its end
    if told["sandboxed"]:
        # before anything is imported that starts threads: those that run already would not be restricted
        sandbox.enter(told["readable"], told["temporary"])
    from .process_host import run

    run(words, int(descriptor))


if __name__ == "__main__":
    main()
