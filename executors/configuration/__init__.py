"""Completes, normalises and validates a model's configuration.

Pure; may import `charonia.models` and no other room of executors. Begin reading at `config`.
"""
