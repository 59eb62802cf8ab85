"""The owner of an ensemble: runs its planner and carries out what it decides (section 7.3 of the interface map).

owned        the shell around one `EnsembleScheduler`: an `OwnedModel` whose requests are steps of other models
submission   steps on their way into the queues of their models
answers      what the steps answered, kept in the log until their request is settled
endings      settles and answers requests that have come through their graph, or failed in it
tensors      what the planner hands around: tensors and where they lie
"""
