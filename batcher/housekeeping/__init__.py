"""Periodic work for all models: lost batches and jobs, jobs that are overdue, streams of departed endpoints, trimming.

May import every room of the batcher; only `service` imports it, and `metrics` the reports of adaptive batching. Begin
reading at `periodic_checks`, which says when each check is due.
"""
