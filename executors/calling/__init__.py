"""Sends models' calls of other models through the log.

May import the kernel only. Begin reading at `executor_calls`.
"""
