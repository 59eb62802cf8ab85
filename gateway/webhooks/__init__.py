"""Calls the webhooks of ended jobs, in a process of its own. The gateway uses `addresses` and `deliveries` alone.

May import no other room of the gateway. Begin reading at `sender`.
"""
