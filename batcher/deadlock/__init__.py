"""Finds and ends calls between models that wait for one another for ever. May import `owner`, `entries` and the rules
in `scheduling.deadlock`. Begin reading at `deadlock_watch`.
"""
