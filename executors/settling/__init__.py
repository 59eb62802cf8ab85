"""What batches leave in the log: their starts, answers, settlements and usage, states of sequences and progress of
requests. States and progress are also read here, as are results of jobs that were settled before, and which requests of
a burst wave are unsettled.

May import `running` and below. Begin reading at `settler`, then `settlement`, the pure part; `wave_settler` does the
same for waves.
"""
