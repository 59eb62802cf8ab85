"""The scheduler: observations and a time in, decisions out.

Everything here is pure: no clock, no I/O, no event loop. May import nothing else of the batcher. Begin reading at
`observations`, `decisions` and `verbs`, then at one scheduler: `stateless.scheduler`, `sequences.sequence_scheduler`
or `ensembles.ensemble_planner`.
"""
