"""Work of unbounded length, away from the event loop: in worker processes over shared memory, or in threads.

May import errors and nothing else of the kernel; functions that workers run are named by their users. Begin reading at
`pool`.
"""
