"""The executor: loads models, runs batches on their instances, and settles the batches in the log.

Rooms import downwards, in the order of the map (`docs/architecture.md`, part 3). From outside the package they import
the kernel only. Begin reading at `service`, then `intake`, which takes the batches.
"""
