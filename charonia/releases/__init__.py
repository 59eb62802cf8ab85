"""Releases of model versions: where requests go that name no version, and when that changes. Pure.

It may import facts and what is below. Begin reading at `route_rule`, the rule of a model. `release_gate` decides
whether a candidate gets more requests or none. `answer_comparison` compares answers of two versions.
`gateway.releases` applies them.
"""
