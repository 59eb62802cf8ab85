"""Waves in an executor: requests alike run and are answered as columns, without a record of their own.

`wave_execution` runs a batch of waves on an instance, `wave_settler` answers and settles it, `reply_sockets` is the way
back to gateways of the same machine. May import what `executors` offers for batches of requests; begin with
`wave_execution`.
"""
