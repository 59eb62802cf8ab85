"""Finds calls between models that wait for one another for ever, and ends them.

May import `owner`, `entries` and the judgement in `scheduling.deadlock`. Begin reading at `deadlock_watch`.
"""
