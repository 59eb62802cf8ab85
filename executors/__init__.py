"""The executor: loads models, runs batches on their instances, and settles them in the log.

Rooms import downwards: `deployment`, then `waves`, then `loading` and `settling`, then `running`, `streams` and
`batches`, with `backends`, `repository`, `configuration` and `host` below; from outside the package they import the
kernel only. Begin reading at `service`, then `intake`: the way of a batch.
"""
