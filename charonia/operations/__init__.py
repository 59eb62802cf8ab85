"""Operators' commands against the log: queues, jobs, dead letters, the audit. No service is asked or needed."""
