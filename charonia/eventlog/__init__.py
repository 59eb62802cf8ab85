"""The event log: its port, its adapters, and what all services do with it.

May import `wire`, `catalog`, `facts` and below; services use the port, never an adapter. Begin reading at `port`; the
adapters are `redis` and `memory`, and `control`, `membership` and `payloads` serve every process.
"""
