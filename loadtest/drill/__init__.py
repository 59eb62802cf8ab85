"""What a server bears: `python -m loadtest.drill` kills every part at every step of a request's life, and checks.

`overload` watches for false losses on a busy machine, `neighbours` measures how long small calls wait while
hostile clients call.
"""
