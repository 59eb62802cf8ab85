"""Operators' commands, directly on the log: queues, jobs, dead letters, executors, audits, states, repositories.

May import the event log and below; no service needs to run. Begin reading at `command_line`.
"""
