"""What several services ask of models through the log. Calls: shared by the gateway, ensembles and models that call
models. Orders: `model_control` loads and unloads models, `route_control` changes routing rules, `request_endings` ends
requests before they are done.

May import the kernel up to the event log, and no service. Begin reading at `admission`, which checks a request against
its model before anything enters the log, then at `requester`, which sends it and gives it one outcome.
"""
