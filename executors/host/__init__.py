"""This machine and its processes: devices, cores, memory, children.

May import nothing else of executors. Begin reading at `host_policy`.
"""
