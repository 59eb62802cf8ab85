"""Which executor a request for text goes to. Pure.

May import `queues` and the rooms below it. Begin reading at `prefix_routing`.
"""
