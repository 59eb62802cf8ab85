"""Queue entries and the requests they carry: read, bounded by windows, burst, refused, deleted when settled.

May import `scheduling` for the observations that requests become. Begin reading at `carriers`.
"""
