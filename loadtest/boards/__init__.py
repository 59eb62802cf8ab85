"""`python -m loadtest.boards`, `make boards`: every query of boards and alerts, asked of a Prometheus that scrapes a loaded server.

Begin reading at `__main__`. `expressions` reads the queries, `served` makes models and load, `prometheus` runs and asks one.
"""
