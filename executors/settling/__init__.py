"""Writes to the log for batches: their starts, answers, settlements, and the states of sequences.

May import `running` and below. Begin reading at `settler`, then `settlement`, the pure part; `wave_settler` does the
same for waves.
"""
