"""Poison isolation: splits the requests of a failed batch and runs them apart, until the culprit is known. May import
`queues` and the root of `scheduling`. Begin reading at `poison_isolation`.
"""
