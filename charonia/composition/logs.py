"""Log lines of every process: to stderr, by Triton's switches (L1)."""

from __future__ import annotations

import logging
import sys

from charonia.errors import StartupError
from charonia.log_lines import FORMATS, LineFormatter
from charonia.options.values import Values


def configure_logging(values: Values) -> None:
    """Levels by `--log-verbose`, `--log-info`, `--log-warning`, `--log-error`, lines by `--log-format`.

    Raises `StartupError` for an unknown format.
    """
    if values["log_format"] not in FORMATS:
        raise StartupError(f"--log-format must be one of {', '.join(FORMATS)}, got '{values['log_format']}'")
    level = logging.CRITICAL
    if values["log_error"]:
        level = logging.ERROR
    if values["log_warning"]:
        level = logging.WARNING
    if values["log_info"]:
        level = logging.INFO
    if values["log_verbose"] > 0:
        level = logging.DEBUG
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(values["log_format"]))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("asyncio", "uvicorn", "uvicorn.error", "hpack"):  # the last tells of all headers, secrets as well
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))
