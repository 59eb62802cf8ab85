"""Composition: one role in this process (`roles`), or all of them on this machine (`supervisor`).

May import everything: with `charonia.cli` and `charonia.inprocess` it is the only kernel code that may import the
services. Begin reading at `roles`; functions of a user's own program are served by `bound_server`, in a thread of
`hosting`.
"""
