"""What the log says while the ports wait for the first loads."""

from __future__ import annotations

from catalog_facts import catalog, joined, left, loaded, scanned

from charonia.facts.events import VersionStateChanged
from gateway.reports.start_progress import StartProgress


def test_the_longest_load_comes_first_and_what_has_ended_is_left_out() -> None:
    progress, found = StartProgress(2), catalog()
    assert progress.text(found.executors, 1.0) == ("the ports stay closed: 0 of 2 executors have loaded their models")
    for executor in ("e", "f"):
        found.apply(joined(executor))
        found.apply(scanned(executor, ready=executor == "f"))
    for now_s, name in ((10.0, "n"), (12.0, "m"), (15.4, "x")):
        found.apply(VersionStateChanged("e", name, 1, "LOADING"))
        progress.see(found.executors, now_s)
    found.apply(loaded("e"))
    progress.see(found.executors, 20.0)
    pid = found.executors["e"].joined.pid
    assert progress.text(found.executors, 30.0) == (
        "the ports stay closed: 1 of 2 executors have loaded their models; still loading "
        f"'n' version 1 since 20 s on executor e (pid {pid}), 'x' version 1 since 15 s on executor e (pid {pid})"
    )
    for number in range(12):
        found.apply(VersionStateChanged("e", f"more {number}", 1, "LOADING"))
    progress.see(found.executors, 31.0)
    assert progress.text(found.executors, 31.0).endswith(", 4 more")
    found.apply(left("e"))
    progress.see(found.executors, 32.0)
    assert progress.text(found.executors, 32.0).endswith("1 of 2 executors have loaded their models")
