"""The load of several models at the same time, with benches that are made up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from charonia.analyzer.benching import Bench
from charonia.errors import Unavailable
from charonia.tuner import trial_measurement


class Load(Bench):
    """One whose second window fails when it `fails`."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.is_sending, self.windows = fails, False, 0

    def begin(self, level: float) -> None:
        self.is_sending = True

    def take_window(self) -> bool:
        self.windows += 1
        if self.fails and self.windows == 2:
            raise Unavailable("gone")
        return self.windows >= 3

    def end(self) -> Any:
        self.is_sending = False
        if self.fails:
            raise Unavailable("gone")
        return self.windows


@pytest.mark.parametrize("fails", [0, 1])
def test_after_an_error_none_goes_on_sending(fails: int) -> None:
    loads = [Load(at == fails) for at in range(2)]
    with ThreadPoolExecutor(2) as threads, pytest.raises(Unavailable, match="gone"):
        trial_measurement._side_by_side(loads, 8, threads)
    assert not any(load.is_sending for load in loads)
    with pytest.raises(Unavailable):
        trial_measurement._side_by_side([Load(True)], 8, None)


def test_all_take_windows_until_all_are_done() -> None:
    loads = [Load(), Load()]
    with ThreadPoolExecutor(2) as threads:
        assert trial_measurement._side_by_side(loads, 8, threads) == [3, 3]
    assert not any(load.is_sending for load in loads)
