"""One server: its address, its connection, and its current place under Sentinel or a cluster.

May import nothing else of the adapter. Begin reading at `hot_connection`, then `transport`.
"""
