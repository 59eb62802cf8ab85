"""Log lines of every process: to stderr or a file, by Triton's switches (L1)."""

from __future__ import annotations

import logging

from charonia.errors import StartupError
from charonia.log_lines import FORMATS, Severities, change_severities, open_handler
from charonia.options.values import Values


def configure_logging(values: Values) -> None:
    """Levels by `--log-verbose`, `--log-info`, `--log-warning`, `--log-error`, lines by `--log-format`, `--log-file`.

    Raises `StartupError` for an unknown format and for a file that cannot be written.
    """
    if values["log_format"] not in FORMATS:
        raise StartupError(f"--log-format must be one of {', '.join(FORMATS)}, got '{values['log_format']}'")
    severities = Severities(values["log_info"], values["log_warning"], values["log_error"], values["log_verbose"])
    try:
        handler = open_handler(values["log_file"], values["log_format"])
    except OSError as error:
        raise StartupError(f"--log-file '{values['log_file']}' cannot be written: {error.strerror or error}") from None
    logging.basicConfig(handlers=[handler], force=True)
    change_severities(severities)
    for noisy in ("asyncio", "uvicorn", "uvicorn.error", "hpack"):  # the last tells of all headers, secrets as well
        logging.getLogger(noisy).setLevel(max(severities.level, logging.WARNING))
