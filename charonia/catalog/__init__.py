"""Which executors serve which versions now: a fold of the control facts that is the same in every process.

Pure; may import `models`, `facts` and below. Begin reading at `catalog`.
"""
