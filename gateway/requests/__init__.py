"""Properties of a request besides inference: delivery, preferences, idempotency, classification, bounds.

Pure; may import no other room of the gateway. Begin reading at `delivery`.
"""
