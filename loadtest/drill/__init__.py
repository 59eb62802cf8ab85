"""`python -m loadtest.drill`: kills every part of a server at every step of a request's life, and checks."""
