"""Calling a served model through the log: what the gateway, ensembles and models that call models have in common.

`admission` checks a request against its model before anything enters the log.
"""
