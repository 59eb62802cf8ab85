"""The event log in one process's memory, for tests and as the local part of a co-located log.

May import the root of `eventlog`, and no other adapter. Begin reading at `log`.
"""
