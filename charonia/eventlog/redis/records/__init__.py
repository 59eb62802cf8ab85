"""What the log's keys hold, as arguments of commands and scripts and back.

Pure; may import `server.packing` and `scripts`. Begin reading at `settlements`.
"""
