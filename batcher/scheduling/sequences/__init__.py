"""The scheduler of stateful models: sequences, their slots and their batches.

May import `queues`, `poison`, `deadlock` and the root of `scheduling`. Begin reading at `sequence_scheduler`, then
`sequence_ledger` and `sequence_dispatch`.
"""
