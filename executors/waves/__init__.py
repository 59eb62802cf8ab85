"""Waves in an executor: requests alike run and are answered as columns, without a record of their own.

`execution` runs a batch of waves on an instance, `settling` answers and settles it, `replies` is the way back to
gateways of the same machine. May import what `executors` offers for batches of requests; begin with `execution`.
"""
