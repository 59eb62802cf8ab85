"""`python -m loadtest.stack`, `make stack-test`: the compose stack scaled, killed and upgraded under load."""
