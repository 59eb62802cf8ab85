"""A native model in a process of its own, so that its crash costs one instance.

May import `backends`, `configuration` and `host`. Begin reading at `isolated_instance`.
"""
