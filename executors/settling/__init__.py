"""What a batch writes to the log: its beginning, its answers, its settlement, and what sequences keep.

May import `running` and below. Begin reading at `settler`, then `settlement`, the pure part.
"""
