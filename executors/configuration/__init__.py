"""Completes, normalises and validates a model's configuration.

Pure, but that `declarations` asks the classes of backends; may import no other room of executors. Begin reading at
`config`.
"""
