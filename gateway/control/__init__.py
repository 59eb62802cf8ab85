"""What a gateway says of itself and of its models: metadata, statistics, readiness, log settings.

Pure; may import `handler`, whose values it makes. Begin reading at `model_statistics`.
"""
