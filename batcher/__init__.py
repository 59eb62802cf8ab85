"""The batcher: owns models, queues their requests and decides which batches executors run.

Rooms import downwards: `housekeeping`, then `takeover`, `deadlock` and `ensembles`, then `owner`, `entries` and the
pure `scheduling`; from outside the package they import the kernel only. Begin reading at `service`, then
`owner.owned`.
"""
