"""The protocol between an executor and a model's process: frames, shared memory, command line.

Both sides import it, so it may import little: NumPy and msgpack, nothing else of executors. Begin reading at `frames`.
"""
