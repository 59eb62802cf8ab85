"""The scheduler of stateless models: queues in, batches for free instances out.

May import `queues`, `poison` and the root of `scheduling`. Begin reading at `scheduler`, then `model_state` and
`dispatch`.
"""
