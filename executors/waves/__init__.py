"""Waves in an executor: requests alike that were run as columns are answered and settled together.

May import `settling`, `running` and below; waves are run by `executors.batches.wave_execution`. Begin reading at
`wave_settler`.
"""
