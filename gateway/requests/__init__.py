"""Properties of a request besides inference: delivery, preferences, idempotency, classification, bounds; and
work on large bodies and tensors that leaves the event loop.

Pure but for `decompression` and `large_tensors`, which pass work to worker processes and threads (`charonia.offload`).
May import no other room of the gateway. Begin reading at `delivery`.
"""
