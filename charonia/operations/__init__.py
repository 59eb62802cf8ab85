"""Operators' commands against the log: queues, jobs, dead letters, executors, the audit.

May import the event log and below; no service is asked or needed. Begin reading at `command_line`.
"""
