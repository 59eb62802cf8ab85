"""The instances of loaded versions, and the workers that run batches on them.

May import `streams`, `batches` and the rooms below them. Begin reading at `instance_pool`, then `workers`.
"""
