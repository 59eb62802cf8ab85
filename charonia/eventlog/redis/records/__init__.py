"""What the log's keys hold, as arguments of commands and scripts and back.

Pure; may import `scripts`, and from `server.transport` how a command is packed. Begin reading at `work_records`.
"""
