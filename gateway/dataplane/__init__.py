"""A request's way into the log and its answer's way back.

May import `access` and `requests`. Begin reading at `dataplane`, then `coalescing`.
"""
