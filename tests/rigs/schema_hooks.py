"""What schemathesis does in addition: it asks for what exists, and takes an unforeseen error for a failure.

Read by the `schemathesis` program itself (`schema_fuzzing`), which imports it by the name in SCHEMATHESIS_HOOKS.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import schemathesis

KNOWN: dict[str, str] = json.loads(os.environ["CHARONIA_FUZZED"])
"""Parameters of paths with a value that exists, put into three of four requests: random ones hardly ever do."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    values = case.path_parameters
    for name, value in list((values or {}).items()):
        if name in KNOWN and zlib.crc32(repr((value, case.body)).encode("utf-8", "replace")) % 4:
            values[name] = KNOWN[name]
    if values and "/repository/" in case.path and values.get("model") == KNOWN["model"]:
        values["model"] = KNOWN["reloaded"]  # the model that other requests ask for stays loaded


@schemathesis.check
def no_unforeseen_error(context: Any, response: Any, case: Any) -> None:
    """Status 500 is for what Triton answers so, never for an exception that no code expected."""
    assert b"internal server error" not in response.content, "an exception that no code expected"
