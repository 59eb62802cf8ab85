"""Periodic work for all models: overdue batches and jobs, departed endpoints, trimming of streams. May import every
room of the batcher; only `service` imports it. Begin reading at `rounds`, which says when each is due.
"""
