"""What batches leave in the log: their starts, answers, settlements and usage, states of sequences and progress of
requests. The last two are also read here.

May import `running` and below. Begin reading at `settler`, then `settlement`, the pure part; `wave_settler` does the
same for waves.
"""
