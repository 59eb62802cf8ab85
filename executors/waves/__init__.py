"""Answers and settles waves: similar requests that were executed together as columns.

May import `settling`, `running` and below. `executors.batches.wave_execution` runs the waves. Begin reading at
`wave_settler`.
"""
