"""The machine: devices, cores, memory, and child processes.

May import nothing else of executors. Begin reading at `host_policy`.
"""
