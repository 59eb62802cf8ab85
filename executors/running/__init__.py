"""The instances of loaded versions, and the workers that run batches on them.

May import `batches` and the rooms below it. Begin reading at `instance_pool`, then `workers`; `streamed_batch` tracks
requests that may have several responses.
"""
