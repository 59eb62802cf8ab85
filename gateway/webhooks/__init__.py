"""Calls the webhooks of ended jobs, in a process of its own. The gateway uses only `addresses` and `deliveries`.

May import no other room of the gateway. Begin reading at `sender`.
"""
