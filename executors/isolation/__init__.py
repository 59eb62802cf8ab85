"""Runs native models in processes of their own, one for each model and device, in a sandbox where that is wanted.

May import `backends`, `configuration` and `host`. Begin reading at `isolated_model`, then
`process_handle`; `child` is what runs there.
"""
