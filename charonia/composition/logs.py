"""Log lines of every process: to stderr or a file, by Triton's switches (L1)."""

from __future__ import annotations

import logging

from charonia.errors import StartupError
from charonia.log_lines import FORMATS, open_handler
from charonia.options.values import Values


def configure_logging(values: Values) -> None:
    """Levels by `--log-verbose`, `--log-info`, `--log-warning`, `--log-error`, lines by `--log-format`, `--log-file`.

    Raises `StartupError` for an unknown format and for a file that cannot be written.
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
    try:
        handler = open_handler(values["log_file"], values["log_format"])
    except OSError as error:
        raise StartupError(f"--log-file '{values['log_file']}' cannot be written: {error.strerror or error}") from None
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("asyncio", "uvicorn", "uvicorn.error", "hpack"):  # the last tells of all headers, secrets as well
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))
