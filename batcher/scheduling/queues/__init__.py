"""Queues of requests and the batches formed from them: priorities, policies, fairness, delays, order. May import the
root of `scheduling` only. Begin reading at `queueing`, then `dynamic_batching` and `ledger`.
"""
