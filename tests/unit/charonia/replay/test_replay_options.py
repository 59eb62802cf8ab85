"""The words of `charonia replay`."""

from __future__ import annotations

import pytest

from charonia.errors import InvalidArgument
from charonia.releases.answer_differences import Tolerance
from charonia.replay.replay_options import Target, parser, target_of, tolerances_of


@pytest.mark.parametrize(("text", "model", "version"), [("resnet:3", "resnet", 3), ("a:b:12", "a:b", 12)])
def test_targets(text: str, model: str, version: int) -> None:
    assert target_of(text) == Target(model, version)


@pytest.mark.parametrize("text", ["resnet", "resnet:", ":3", "resnet:x", "resnet:0", "resnet:-1", "resnet:" + "9" * 19])
def test_wrong_targets(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--to"):
        target_of(text)


@pytest.mark.parametrize(
    ("absolute", "relative", "found"),
    [
        ([], [], {"": Tolerance()}),
        (["0.1"], ["y=0.2"], {"": Tolerance(0.1, 0.0), "y": Tolerance(0.1, 0.2)}),
        (["a=b=1"], ["0.5"], {"": Tolerance(0.0, 0.5), "a=b": Tolerance(1.0, 0.5)}),
    ],
)
def test_tolerances(absolute: list[str], relative: list[str], found: dict[str, Tolerance]) -> None:
    assert tolerances_of(absolute, relative) == found


@pytest.mark.parametrize("text", ["", "y=", "y=-1", "nan", "inf", "y=x"])
def test_wrong_tolerances(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--absolute"):
        tolerances_of([text], [])


@pytest.mark.parametrize(
    "words",
    [[], ["--to=m:1"], ["--from=here"], ["--from=journal", "--rate=0"], ["--from=journal", "--limit=0"],
     ["--from=journal", "--percent-different-allowed=101"], ["--from=journal", "--timeout=nan"]],
)  # fmt: skip
def test_wrong_usage_has_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parser().parse_args(["replay", *words])
    assert raised.value.code == 2
    assert "usage: charonia replay" in capsys.readouterr().err


def test_a_percent_sign_may_be_written() -> None:
    options = parser().parse_args(["replay", "--from=journal", "--percent-different-allowed=0.5%"])
    assert options.percent_different_allowed == 0.5
