"""Batches whose requests have several responses: where each request stands.

May import `batches`. Begin reading at `streamed_batch`.
"""
