"""What a gateway reports about itself and its models: metadata, statistics, readiness, log settings.

Pure; may import `handler`, whose values it makes. Begin reading at `model_statistics`.
"""
