"""H45, G16: what the switches mean and what changing them does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from charonia.errors import CharoniaError, InvalidArgument, Unsupported
from gateway.control.log_settings import TYPES, LogSwitches, apply, current


@pytest.fixture(autouse=True)
def _root_level() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, logging.INFO),
        ({"log_verbose_level": 1}, logging.DEBUG),
        ({"log_info": False}, logging.WARNING),
        ({"log_info": False, "log_warning": False}, logging.ERROR),
        ({"log_info": False, "log_warning": False, "log_error": False}, logging.CRITICAL),
        ({"log_warning": False}, logging.INFO),
    ],
)
def test_the_lowest_that_is_on_is_the_level(changes: dict[str, Any], level: int) -> None:
    switches = LogSwitches().changed(changes)
    assert switches.level == level
    apply(switches)
    assert logging.getLogger().level == level


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL])
def test_the_present_level_reads_back(level: int) -> None:
    logging.getLogger().setLevel(level)
    assert current().level == level


def test_a_reply_names_all_settings_in_order() -> None:
    assert list(LogSwitches().reply()) == list(TYPES)


def test_unknown_keys_are_ignored() -> None:
    assert LogSwitches().changed({"odd": 1, "log_format": "default"}) == LogSwitches()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"log_file": "x"}, Unsupported, "log file location can not be updated through network protocol"),
        ({"log_format": "ISO8601"}, Unsupported, "changing log_format to ISO8601 at run time is not built yet"),
        ({"log_format": "odd"}, InvalidArgument, "invalid argument for --log_format, got: odd"),
    ],
)
def test_refusals(changes: dict[str, Any], error: type[CharoniaError], message: str) -> None:
    with pytest.raises(error) as caught:
        LogSwitches().changed({"log_info": False, **changes})
    assert caught.value.message == message
