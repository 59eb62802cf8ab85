"""Releases of model versions: where requests go that name no version, and when that changes. Pure.

It may import facts and what is below. Begin reading at `route_rule`, the rule of a model; `route_change` is an
operator's change of it. `release_gate` decides whether a candidate gets more requests or none. `answer_comparison` says
whether answers of two versions differ, for shadows. `gateway.releases` uses these three. `answer_differences` says by
how much they differ, for `charonia.replay`.
"""
