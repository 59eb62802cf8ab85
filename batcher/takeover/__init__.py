"""Takes a model over: ownership, fenced by a token, and the state of its work restored from the log.

May import `owner`, `entries` and `scheduling`. Begin reading at `ownership`, then `recovery`.
"""
