"""`make helm`: renders the Helm chart for a matrix of values and checks the result (ADR 0056).

Begin reading at `__main__`. `cases` is the matrix, `rendering` runs Helm, `schemas` checks manifests with the schemas
of their kinds, `values_page` writes the table of values, `chart_files` says which files the chart has.
"""
