"""Facts and records that the log keeps: events, jobs, the journal and its seals, sequences, counters.

Pure; may import tensors, data types and errors. Begin reading at `events`.
"""
