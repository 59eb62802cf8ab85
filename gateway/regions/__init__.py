"""Clients' shared memory: which regions are registered on this machine, and what requests read from and write to them.

May import nothing else of the gateway. Begin reading at `client_regions`.
"""
