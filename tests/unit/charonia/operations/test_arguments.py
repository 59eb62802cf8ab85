"""The command line of the operators' commands: what it takes and refuses."""

from __future__ import annotations

import argparse

import pytest

from charonia.operations.arguments import duration_s, parser, request_id, since, words
from charonia.operations.command_line import run


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400), ("250ms", 0.25)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "-1", "1 h", "h", "1w", "inf"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        duration_s(text)


def test_since_is_a_time_or_a_duration() -> None:
    assert since("2h") == ("ago", 7200.0)
    assert since("1970-01-01T00:01:00+00:00") == ("at", 60.0)
    with pytest.raises(argparse.ArgumentTypeError):
        since("yesterday")


def test_request_ids_may_name_their_model() -> None:
    assert request_id("ab" * 16) == request_id("ab" * 16 + ".model.v2") == b"\xab" * 16
    with pytest.raises(argparse.ArgumentTypeError):
        request_id("AB" * 16)


@pytest.mark.parametrize(
    "line",
    [
        "audit --since yesterday",
        "audit extra",
        "audit --verify --since 2h",
        "audit --verify --export facts.jsonl",
        "audit --heads file",
        "audit --max-unsealed 5m",
        "audit --export facts.jsonl --heads file",
        "audit --until 2h",
        "audit --verify --overwrite",
        "queue",
        "queue move m --level 1",
        "queue move m --level 0 --id " + "ab" * 16,
        "queue cancel m",
        "queue cancel m --all --id " + "ab" * 16,
        "queue cancel m --id short",
        "queue inspect m --limit 0",
        "jobs ls --state finished",
        "jobs cancel",
        "jobs cancel --all id.m",
        "dlq replay",
        "dlq drop m x --all",
        "dlq show",
        "jobs show x --unknown",
        "audit --mod m",
        "state export",
        "state import f --overwrite",
        "state show f",
        "check",
        "check a b",
        "check --gpus -1 a",
        "migrate",
        "migrate --from other a",
        "route m --canary 2:abc",
        "route m --match odd",
    ],
)
def test_wrong_usage_exits_with_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run(line.split(), {}, lambda: "/nowhere")
    assert end.value.code == 2
    assert capsys.readouterr().err


def test_an_option_before_the_action_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run(["jobs", "--state-dir", "there", "ls"], {}, lambda: "/nowhere")
    assert end.value.code == 2
    said = "--state-dir belongs behind the action: charonia jobs ACTION --state-dir"
    assert capsys.readouterr().err.endswith(said + "\n")


def test_no_running_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["queue", "ls"], {}, lambda: "/nowhere/state") == 1
    error = capsys.readouterr().err
    assert error.startswith("charonia: no running 'charonia serve' has the state directory '/nowhere/state'")
    assert run(["queue", "ls"], {"CHARONIA_STATE_DIR": "/from/environment"}, lambda: "/nowhere") == 1
    assert "/from/environment" in capsys.readouterr().err
    assert run(["queue", "ls", "--log-url", "unix:///nowhere/log.sock"], {}, lambda: "/nowhere") == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_every_command_offers_its_flags_for_completion() -> None:
    offered = words(parser())
    assert set(offered) == {
        "audit",
        "usage",
        "queue",
        "jobs",
        "dlq",
        "executors",
        "route",
        "state",
        "trace",
        "check",
        "migrate",
    }
    assert "--since" in offered["audit"][""]
    assert {"--fix", "--gpus"} <= set(offered["check"][""])
    assert set(offered["queue"]) == {"ls", "inspect", "pause", "resume", "cancel", "move"}
    for command, actions in offered.items():
        for action, flags in actions.items():
            offline = command in ("trace", "check", "migrate")
            needs = {"--json"} if offline else {"--json", "--log-url", "--state-dir"}
            assert needs <= set(flags), (command, action)


def test_every_action_says_what_it_does() -> None:
    for command, actions in words(parser()).items():
        for action in actions:
            with pytest.raises(SystemExit) as end:
                parser().parse_args([command, *filter(None, [action]), "--help"])
            assert end.value.code == 0
