"""What an executor and a model's process say to each other: frames, shared memory, command line.

Both sides import it, so it may import little: NumPy and msgpack, nothing else of executors. Begin reading at `frames`.
"""
