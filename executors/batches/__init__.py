"""Arrays in, records out: plans a batch, joins tensors, runs it, and cuts the results apart.

Pure; may import `repository` and the kernel. Begin reading at `execution`, then `assembly` and `answers`; waves are
run by `wave_execution`.
"""
