"""`python -m loadtest.boards`, `make boards`: a Prometheus that scrapes a loaded server is asked the boards' queries.

Begin reading at `__main__`. `expressions` reads the queries, `served` makes models and load, `prometheus` runs
and asks one.
"""
