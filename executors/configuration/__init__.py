"""A model's configuration: completed, judged, normalised.

Pure; may import `charonia.models` and no other room of executors. Begin reading at `config`.
"""
