"""Calls a served model through the log: what the gateway, ensembles and models that call models have in common.

May import the kernel up to the event log, and no service. Begin reading at `admission`, which checks a request against
its model before anything enters the log, then at `requester`, which sends it and gives it one outcome.
"""
