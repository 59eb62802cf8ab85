"""The executor: loads models, runs batches on their instances, and settles the batches in the log.

Rooms import downwards: `deployment`, then `loading` and `settling`, then `running`, then `isolation`, then `batches`
and `backends`, then `repository`, with `configuration` and `host` below. From outside the package they import the
kernel only. Begin reading at `service`, then `intake`, which takes the batches.
"""
