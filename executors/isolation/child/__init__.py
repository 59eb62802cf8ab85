"""What runs in the process of an isolated model: the model, and its instances as threads or tasks.

May import `isolation.forms`, `backends` and `host`. Begin reading at `process_host`.
"""
