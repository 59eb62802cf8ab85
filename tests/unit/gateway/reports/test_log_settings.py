"""H45, G16: what the switches mean and what changing them does."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from charonia.errors import Unsupported
from charonia.log_lines import LineFormatter, Severities, change_severities
from gateway.grpc.control_messages import log_settings
from gateway.reports.log_settings import TYPES, LogSwitches, apply, current


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
    assert switches.severities.level == level
    apply(switches)
    assert logging.getLogger().level == level


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL])
def test_the_present_level_reads_back(level: int) -> None:
    logging.getLogger().setLevel(level)
    assert current().severities.level == level


def test_a_reply_names_all_settings_in_order() -> None:
    assert list(LogSwitches().reply()) == list(TYPES)


def test_unknown_keys_are_ignored() -> None:
    assert LogSwitches().changed({"odd": 1, "log_format": "default"}) == LogSwitches()


@pytest.mark.parametrize(
    ("number", "level"), [(7, 7), (2**31 - 1, 2**31 - 1), (2**31, 0), (2**32 - 1, 0), (2**32, 0), (2**32 + 1, 1)]
)
def test_a_verbose_level_is_what_triton_makes_of_it_and_has_a_place_in_both_answers(number: int, level: int) -> None:
    switches = LogSwitches().changed({"log_verbose_level": number})
    assert switches.reply()["log_verbose_level"] == level
    assert log_settings(switches).settings["log_verbose_level"].uint32_param == level


@pytest.mark.parametrize(("option", "level"), [(-1, 0), (3, 3), (99_999_999_999, 1_215_752_191)])
def test_a_verbose_level_of_the_command_line_has_a_place_too(option: int, level: int) -> None:
    with written():
        change_severities(Severities(verbose=option))
        assert log_settings(current()).settings["log_verbose_level"].uint32_param == level


def test_the_place_of_the_log_cannot_be_changed() -> None:
    with pytest.raises(Unsupported) as caught:
        LogSwitches().changed({"log_info": False, "log_file": "x"})
    assert caught.value.message == "log file location can not be updated through network protocol"


def test_each_switch_is_kept_and_hides_its_own_lines() -> None:
    logger = logging.getLogger("of.a.test")
    with written() as stream:
        for changes in ({"log_warning": False}, {"log_error": False}, {"log_verbose_level": 3}, {"log_info": False}):
            apply(current().changed(changes))
        assert current() == LogSwitches("", False, False, False, 3)
        for severity in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
            logger.log(severity, "line %d", severity)
        apply(current().changed({"log_warning": True, "log_verbose_level": 0}))
        assert current() == LogSwitches("", False, True, False, 0)
        logger.warning("back")
        logger.error("hidden")
        apply(LogSwitches())
    said = [line.partition("] ")[2] for line in stream.getvalue().splitlines() if "of.a.test" in line]
    assert said == ["line 10", "line 50", "back"]


@contextmanager
def written() -> Iterator[io.StringIO]:
    """What the root logger writes in our format."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    logging.getLogger().addHandler(handler)
    try:
        yield stream
    finally:
        logging.getLogger().removeHandler(handler)


def test_the_format_of_lines_changes_at_once() -> None:
    with written() as stream:
        apply(LogSwitches().changed({"log_format": "ISO8601"}))
        assert current().log_format == "ISO8601"
        logging.warning("one")
        apply(current().changed({"log_format": "default"}))
        assert current() == LogSwitches()
        logging.warning("two")
    lines = stream.getvalue().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ W \d+ root\] one", lines[1])
    assert re.fullmatch(r"W\d{4}-\d\d-\d\d .* \d+ root\] two", lines[-1])
