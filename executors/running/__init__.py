"""The instances of loaded versions and the workers that run batches on them.

May import `streams`, `batches` and below. Begin reading at `instance_pool`, then `workers`.
"""
