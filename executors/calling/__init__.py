"""Models that call models: carries their calls into the log.

May import the kernel only. Begin reading at `executor_calls`.
"""
