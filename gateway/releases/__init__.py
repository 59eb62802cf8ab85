"""Releases of model versions, as a gateway takes part in them.

It may import the kernel and `gateway.requests`. Begin reading at `version_choice`, which applies a model's routing rule
to a request. `release_watch` judges candidates and changes rules, `shadow_requests` sends copies, `request_recorder`
keeps requests and answers for `charonia replay`.
"""
