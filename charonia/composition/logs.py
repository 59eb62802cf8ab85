"""Log lines of every process: to stderr, by Triton's switches (L1)."""

from __future__ import annotations

import logging
import sys

from charonia.options.values import Values

LINE_FORMAT = "%(levelname).1s%(asctime)s %(process)d %(name)s] %(message)s"


def configure_logging(values: Values) -> None:
    """Levels by `--log-verbose`, `--log-info`, `--log-warning`, `--log-error`."""
    level = logging.CRITICAL
    if values["log_error"]:
        level = logging.ERROR
    if values["log_warning"]:
        level = logging.WARNING
    if values["log_info"]:
        level = logging.INFO
    if values["log_verbose"] > 0:
        level = logging.DEBUG
    logging.basicConfig(
        level=level,
        stream=sys.stderr,
        format=LINE_FORMAT,
        force=True,
    )
    for noisy in ("asyncio", "uvicorn", "uvicorn.error", "hpack"):  # the last tells of all headers, secrets as well
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))
