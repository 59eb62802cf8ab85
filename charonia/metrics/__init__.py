"""Metrics that several services show: the endpoint, latencies, the host, the response cache.

May import everything in the kernel but `composition`. Begin reading at `endpoint`.
"""
