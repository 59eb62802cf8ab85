"""What a request asks for besides inference: delivery, preferences, idempotency, classification.

Pure; may import no other room of the gateway. Begin reading at `delivery`.
"""
