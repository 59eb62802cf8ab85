"""`python -m loadtest.clients`: programs of Triton's users, unchanged, against a server of their models.

`examples` runs the Python examples of Triton's client repository, `perf` runs perf_analyzer, `suites` tests of others'
OpenAI APIs. None is part of this repository: the command takes the path of a checkout or of the program. Begin reading
at `__main__`.
"""
