"""Properties of a request besides inference: delivery, preferences, idempotency, classification; and work on large
bodies and tensors that leaves the event loop. What is true of any inference is in `charonia.inference`.

Pure but for `decompression` and `large_tensors`, which pass work to worker processes and threads (`charonia.offload`).
May import no other room of the gateway. Begin reading at `delivery`.
"""
