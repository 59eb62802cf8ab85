"""One owned model: feeds its scheduler with what the log says and carries out what the scheduler decides.

May import `entries` and `scheduling`. Begin reading at `owned`; decided batches leave through
`dispatched_batches`.
"""
