"""The process of one python model: runs the model's code and answers the executor, with blocking calls.

It runs in the model's environment: may import `protocol`, `api`, `executors.host.parent_death`, NumPy and msgpack.
Begin reading at `model_process`, then `model_host`.
"""
