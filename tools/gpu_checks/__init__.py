"""The checks of `tools/gpu_check.py`, which runs each in a process of its own.

`table` lists them. `serving` starts a server and loads it, `networks` makes the models. A check returns an `Outcome`.
"""
