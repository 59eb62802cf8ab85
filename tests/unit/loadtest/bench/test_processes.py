"""/proc is read right, and every process counts once, towards the role it belongs to."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from loadtest.bench.processes import (
    Usage,
    assign_roles,
    load_roles,
    members,
    parse_parent,
    parse_pss,
    pss_bytes_by_role,
    usage_by_role,
)

CHILD = {"role": "model instance", "pid": 7, "parent": 5}
STAT = "{pid} ({name}) S {parent} 1 1 0 -1 4194560 9 8 7 6 {user} {system} 30 4 20 0 9 0 100 1000 10 1\n"


def test_stat_of_a_command_with_spaces_and_parentheses() -> None:
    text = STAT.format(pid=7, name="a) S (b c", parent=3, user=100, system=20)
    assert parse_parent(text) == 3


@pytest.mark.parametrize("text", ["", "7 (x) S"])
def test_stat_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError):
        parse_parent(text)


def test_pss_in_bytes() -> None:
    assert parse_pss("00-ff ---p 0 00:00 0 [rollup]\nRss: 9 kB\nPss:    12 kB\nPss_Dirty: 3 kB\n") == 12 * 1024
    with pytest.raises(ValueError):
        parse_pss("Rss: 9 kB\n")


def test_descendants_count_towards_their_nearest_listed_ancestor() -> None:
    parents = {1: 0, 10: 1, 11: 10, 12: 11, 20: 10, 21: 20, 30: 1}
    roles = assign_roles({10: "serve", 20: "executor", 99: "gone"}, parents)
    assert roles == {10: "serve", 11: "serve", 12: "serve", 20: "executor", 21: "executor"}


def test_totals_by_role(tmp_path: Path) -> None:
    for pid, parent in ((10, 1), (11, 10), (12, 1)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(STAT.format(pid=pid, name="x", parent=parent, user=1, system=0))
        (tmp_path / str(pid) / "smaps_rollup").write_text("Pss: 2 kB\n")
        for thread in (pid, pid + 100):
            task = tmp_path / str(pid) / "task" / str(thread)
            task.mkdir(parents=True)
            (task / "schedstat").write_text("1000 5 7\n")
            (task / "status").write_text("Name:\tx\nvoluntary_ctxt_switches:\t3\nnonvoluntary_ctxt_switches:\t9\n")
    (tmp_path / "self").mkdir()
    assert members({10: "redis"}, tmp_path) == {10: "redis", 11: "redis"}
    assert usage_by_role({10: "redis", 11: "redis", 99: "gone"}, tmp_path) == {
        "redis": Usage(4000, 12),
        "gone": Usage(0, 0),
    }
    assert pss_bytes_by_role({10: "redis"}, tmp_path) == {"redis": 2 * 2048}


def test_this_very_process_is_found() -> None:
    listed = {os.getpid(): "me"}
    assert usage_by_role(members(listed))["me"].cpu_ns > 0
    assert pss_bytes_by_role(listed)["me"] > 1 << 20


def test_roles_file(tmp_path: Path) -> None:
    path = tmp_path / "processes.json"
    path.write_text(json.dumps([{"role": "gateway", "pid": 5, "started": 1.5}, {"role": "redis", "pid": 6}, CHILD]))
    assert load_roles(path) == {5: "gateway", 6: "redis"}
    assert load_roles(path, models=True) == {5: "gateway", 6: "redis", 7: "model"}
    path.write_text('[{"role": "x"}]')
    with pytest.raises(ValueError, match="role and pid"):
        load_roles(path)
