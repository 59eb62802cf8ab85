from __future__ import annotations

import pytest

from executors.backends.python.protocol.startup_arguments import StartupArguments


def test_the_stub_reads_back_what_the_executor_wrote() -> None:
    arguments = StartupArguments("m", "m_0:odd name", 7, 123, 9, 11)
    words = arguments.words()
    assert words[0] == "charonia-instance:m:m_0:odd name"
    assert StartupArguments.of(words) == arguments


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["charonia-instance:m:i", "7", "8", "-1"],
        ["other:m:i", "7", "8", "-1", "-1"],
        ["charonia-instance:m:i", "x", "8", "-1", "-1"],
    ],
)
def test_other_arguments_are_refused(given: list[str]) -> None:
    with pytest.raises(ValueError):
        StartupArguments.of(given)
