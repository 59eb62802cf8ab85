"""Writes the page about the Python client, which Sphinx fills from the docstrings of `charonia.client`."""

from __future__ import annotations

from pathlib import Path

import charonia.client

PAGE = "reference/client.md"
GROUPS = {
    "Clients": ("Client", "AsyncClient"),
    "Jobs": ("Job", "AsyncJob", "JobStatus", "JobEvent"),
    "What is given and what comes back": ("Result", "SharedRegion", "SharedArray", "Tls", "RetryPolicy"),
    "Errors": ("NotConnected", "Refused", "ConnectionLost", "OnlyCharonia", "JobNotEnded", "Incomprehensible"),
}
_ABOUT = """# Python client

[Ask a server from Python, and from the shell](../docs/howto/python-client.md) says how it is used. Names are those
of `charonia.client`.
"""


def write(target: Path) -> None:
    """Writes the page below `target`. Raises ValueError when a public name of the client has no place in it."""
    named = {name for names in GROUPS.values() for name in names}
    if named != set(charonia.client.__all__):
        raise ValueError(f"the page of the client lacks, or names in vain: {named ^ set(charonia.client.__all__)}")
    lines = [_ABOUT]
    for group, names in GROUPS.items():
        lines += [f"## {group}", ""]
        for name in names:
            kind = "autoexception" if group == "Errors" else "autoclass"
            lines += _documented(kind, f"charonia.client.{name}")
    lines += ["## Options of a call", "", *_documented("autoclass", "charonia.client.results.InferenceOptions")]
    (target / PAGE).parent.mkdir(parents=True, exist_ok=True)
    (target / PAGE).write_text("\n".join(lines))


def _documented(kind: str, name: str) -> list[str]:
    inherited = "   :inherited-members: object,Exception,BaseException,tuple,dict"
    return ["```{eval-rst}", f".. {kind}:: {name}", "   :members:", inherited, "```", ""]
