"""The event log over a Redis Cluster, as one log for each of its primaries.

May import the rest of the adapter, which imports only its entry. Begin reading at `cluster_log`.
"""
