"""Clients' shared memory: the regions registered on this machine, and the tensors of requests in them.

May import nothing else of the gateway. Begin reading at `client_regions`.
"""
