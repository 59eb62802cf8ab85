"""One server: its address, its connection, and where it is when Sentinel or a cluster moves it.

May import nothing else of the adapter. Begin reading at `hot_connection`, then `transport`.
"""
