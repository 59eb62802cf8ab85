"""Tracks batches whose requests may have several responses.

May import `batches`. Begin reading at `streamed_batch`.
"""
