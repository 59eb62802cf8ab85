"""Calls the webhooks of ended jobs, in a process of its own (role `webhooks`). Gateways import only `addresses`, to
check a URL, and `deliveries`, for what the view of a job shows.

May import no other room of the gateway. Begin reading at `sender`.
"""
