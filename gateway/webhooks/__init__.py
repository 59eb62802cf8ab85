"""Calls the webhooks of ended jobs, in a process of its own. The gateway uses `addresses` and `deliveries` alone."""
