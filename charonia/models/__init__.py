"""The typed view of a model's configuration that request paths read, and its JSON form.

Pure; may import tensors, data types and errors. Begin reading at `interface`; `executors.configuration` completes and
validates configurations.
"""
