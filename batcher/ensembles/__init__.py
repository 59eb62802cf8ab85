"""The owner of an ensemble: runs its planner and calls the models of its steps.

May import `owner`, `entries` and `scheduling`; no other room of the batcher knows that a model is an ensemble. Begin
reading at `owned_ensemble`, then `submission` (steps on their way out), `step_answers` and `ensemble_endings`.
"""
