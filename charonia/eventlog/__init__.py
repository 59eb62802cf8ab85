"""The event log: its port, its adapters, and the parts that all services use with it. May import `wire`, `catalog`,
`facts` and below; services use the roles of the port, never an adapter. Begin reading at `port`; the adapter is
`redis`, a batcher and an executor of one process exchange batches through `local_link`, and `control`, `membership` and
`payloads` serve every process.
"""
