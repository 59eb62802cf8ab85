"""Fold a log of tide readings into the highest water of each day."""

import csv
import sys
from collections.abc import Iterable
from datetime import datetime


def highest_by_day(rows: Iterable[dict[str, str]]) -> dict[str, float]:
    highest: dict[str, float] = {}
    for row in rows:
        day = datetime.fromisoformat(row["time"]).date().isoformat()
        level_m = float(row["level_m"])
        if level_m > highest.get(day, float("-inf")):
            highest[day] = level_m
    return highest


def main() -> int:
    with open(sys.argv[1], newline="", encoding="utf-8") as readings:
        for day, level_m in sorted(highest_by_day(csv.DictReader(readings)).items()):
            print(f"{day} {level_m:.2f} m")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
