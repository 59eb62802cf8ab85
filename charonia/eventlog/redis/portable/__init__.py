"""The contents of a log as a file that no server program's format is part of, and back.

May import the adapter's connection. Begin reading at `state_file`, the file; `exporting` reads a log into one,
`importing` writes a log from one.
"""

from __future__ import annotations
