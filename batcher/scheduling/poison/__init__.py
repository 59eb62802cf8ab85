"""Poison isolation: tries the requests of a batch that crashed apart, until the culprit is known.

May import `queues` and the root of `scheduling`. Begin reading at `poison_isolation`.
"""
