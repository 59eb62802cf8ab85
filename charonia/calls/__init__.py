"""Calls a served model through the log: shared by the gateway, ensembles and models that call models. May import the
kernel up to the event log, and no service. Begin reading at `admission`, which checks a request against its model
before anything enters the log, then at `requester`, which sends it and gives it one outcome.
"""
