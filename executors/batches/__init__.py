"""Executes batches: plans requests, joins tensors, runs the model, and splits the results into answers.

Pure; may import `repository` and the kernel. Begin reading at `execution`, then `assembly` and `answers`.
`wave_execution` runs waves.
"""
