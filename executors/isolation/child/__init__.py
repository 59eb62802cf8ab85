"""What runs in the process of an isolated model: the model, and its instances as threads or tasks.

May import `isolation.forms`, `isolation.sandbox`, `backends` and `host`. Begin reading at `process_entry`, which is
started, then `process_host`.
"""
