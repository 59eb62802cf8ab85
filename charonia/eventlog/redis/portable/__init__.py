"""Exports the contents of a log to a file that is independent of server programs, and imports it.

May import the adapter's connection. Begin reading at `state_file`, the file; `exporting` reads a log into one,
`importing` writes a log from one.
"""

from __future__ import annotations
