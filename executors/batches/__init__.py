"""Executes batches: plans requests, joins tensors, runs the model, and splits the results into answers.

Pure but for the clock that `execution`, `wave_execution` and `sequences` read, and `batch_payloads`, which reads and
writes tensors out of band. May import `repository` and the kernel. Begin reading at `execution`, then `assembly` and
`answers`. `wave_execution` runs waves,
`wave_columns` joins them for model processes.
"""
