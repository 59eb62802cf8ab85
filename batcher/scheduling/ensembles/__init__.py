"""The planner of an ensemble: which step of which request runs when.

May import `queues` and the root of `scheduling`. Begin reading at `ensemble_planner`.
"""
