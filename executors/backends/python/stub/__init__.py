"""The model's process: runs the code of one model and answers its executor.

Blocking, and runs in the model's own environment: may import `protocol`, `api`, `executors.host.parentage`, NumPy and
msgpack. Begin reading at `model_process`, then `model_host`.
"""
