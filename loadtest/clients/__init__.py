"""`python -m loadtest.clients`: programs of Triton's users, unchanged, against a server of their models.

`examples` runs the Python examples of Triton's client repository, `perf` runs perf_analyzer. Neither is part of this
repository: the command takes the path of a checkout and of the program. Begin reading at `__main__`.
"""
