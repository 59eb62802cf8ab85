"""Composition: one role in this process (`roles`), or all of them on this machine (`supervisor`).

With `charonia.cli` the only kernel code that may import the services.
"""
