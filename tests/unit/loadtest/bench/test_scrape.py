"""Counters are found among their neighbours."""

from __future__ import annotations

from loadtest.bench.scrape import parse_commands, sum_metric

TEXT = """# HELP charonia_log_entries_appended_total Entries
# TYPE charonia_log_entries_appended_total counter
charonia_log_entries_appended_total{model="a b}",level="1"} 3.0
charonia_log_entries_appended_total{model="c"} 4 1700000000000
charonia_log_entries_appended_total_more 100
plain_total 2.5e3
"""


def test_metrics_add_up_over_labels() -> None:
    assert sum_metric(TEXT, "charonia_log_entries_appended_total") == 7.0
    assert sum_metric(TEXT, "plain_total") == 2500.0
    assert sum_metric(TEXT, "charonia_log_entries") is None


def test_commands_are_summed_without_the_question_itself() -> None:
    info = "# Commandstats\r\ncmdstat_xadd:calls=3,usec=9,usec_per_call=3.00\r\ncmdstat_info:calls=8,usec=1\r\n"
    assert parse_commands(info + "cmdstat_config|get:calls=2,usec=1\r\n") == 5
